"""The search as a whole: more devices never attain less, a plan broken off goes on to the same answer, the verdict."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.planner.attainment import Attainment, AttainmentGoal, OfferedTraffic
from deploy.planner.candidates import SearchSpace
from deploy.planner.drawn import left_out, ranking, verdict
from deploy.planner.front import dominates
from deploy.planner.machines import MODELS, Machines
from deploy.planner.placements import CandidatePlacement, InstanceShape, aggregated, disaggregated
from deploy.planner.probing import RateProbe
from deploy.planner.rate_search import FoundGoodput, HalvingSearch, bracketing
from deploy.planner.search import mark_dominated
from deploy.planner.shortlist import shortlist
from tests.deploy.planner.questions import OPT, answered, load, question, traffic
from tests.deploy.planner.test_queueing import PAIRS


def test_more_devices_never_attain_less() -> None:
    best = []
    for devices in (1, 2, 3, 4):
        answer, _ = answered(question(devices, estimates=100))
        best.append(max(each.goodput for each in answer.ranked))
        assert all(each.placement.devices <= devices for each in answer.ranked)
    assert best == sorted(best)


def test_every_placement_is_ranked_or_left_out_with_a_reason() -> None:
    answer, _ = answered(question(4, estimates=6))
    told = {each.what: each.reason for each in answer.rejected}
    assert len(answer.ranked) + len(told) >= answer.considered
    assert not {str(each.placement) for each in answer.ranked} & set(told)
    assert all(told.values())
    assert [each.per_device for each in answer.ranked] == sorted(
        (each.per_device for each in answer.ranked), reverse=True
    )


def test_the_front_of_an_answer_has_no_dominated_placement() -> None:
    answer, _ = answered(question(4))
    front = [each for each in answer.ranked if each.dominated_by is None]
    assert front
    for each in answer.ranked:
        beaten = any(dominates(other.judged(), each.judged()) for other in answer.ranked)
        assert beaten == (each.dominated_by is not None)


def test_a_broken_off_plan_goes_on_to_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, path = question(2), tmp_path / "probes.jsonl"
    whole, _ = answered(asked, tmp_path / "whole.jsonl")
    measured = []
    measure = RateProbe.measure

    def breaking(probe: RateProbe) -> Attainment:
        if len(measured) == 12:
            raise KeyboardInterrupt
        measured.append(probe.key)
        return measure(probe)

    monkeypatch.setattr(RateProbe, "measure", breaking)
    with pytest.raises(KeyboardInterrupt):
        answered(asked, path)
    path.write_bytes(path.read_bytes() + b'{"key": "torn')
    again = list[str]()
    monkeypatch.setattr(RateProbe, "measure", lambda probe: (again.append(probe.key), measure(probe))[1])
    resumed, store = answered(asked, path, resume=True)
    assert store.reused >= 12 and not set(again) & set(measured)
    assert [(each.placement, each.goodput, each.dominated_by) for each in resumed.ranked] == [
        (each.placement, each.goodput, each.dominated_by) for each in whole.ranked
    ]
    assert resumed.rejected == whole.rejected
    assert len(path.read_bytes().splitlines()) == len((tmp_path / "whole.jsonl").read_bytes().splitlines())


def test_what_is_kept_is_kept_under_everything_it_depends_on() -> None:
    asked = question(2)
    probe = RateProbe(_model(asked), aggregated(InstanceShape(), 1, 512), 2.0, asked.load, asked.goal, (0,))
    others = [
        replace(probe, rate=2.1),
        replace(probe, seeds=(1,)),
        replace(probe, goal=AttainmentGoal(share=0.8)),
        replace(probe, load=load(requests=81)),
        replace(probe, what=aggregated(InstanceShape(), 1, 1024)),
        replace(probe, model=replace(_model(asked), rules=replace(_model(asked).rules, reference=True))),
    ]
    assert len({each.key for each in (probe, *others)}) == 7


def _model(asked):  # type: ignore[no-untyped-def]
    from deploy.planner.probing import ProbeStore, RateProber
    from deploy.planner.search import PlanSearch

    return PlanSearch(asked, RateProber(asked.load, asked.goal, (0,), ProbeStore(None), 0)).near


@pytest.mark.parametrize(
    ("made", "best", "words"),
    [
        # Long outputs after short prompts: decode steps are all there is to do, and prefill workers stand idle.
        (traffic(64, 160, ttft_ms=400, tpot_ms=60), False, "Do not disaggregate: "),
        # Long prompts under a tight TPOT: each holds the tokens of all others up.
        (traffic(1200, 24, ttft_ms=1500, tpot_ms=28), True, "Disaggregate: "),
    ],
)
def test_the_verdict_follows_the_traffic(made, best: bool, words: str) -> None:  # type: ignore[no-untyped-def]
    asked = question(3, load=load(made, requests=120), space=SearchSpace(tp=(1,), budgets=(256, 512)))
    answer, _ = answered(asked)
    split = answer.best(True)
    assert answer.best().placement.split == best  # type: ignore[union-attr]
    assert verdict(answer).startswith(words)
    assert split is not None and answer.ratio is not None and (answer.ratio > 1) == best
    assert ranking(answer).row_count == min(20, len(answer.ranked))


def test_the_reference_assumptions_give_the_references_placement() -> None:
    """OPT-13B on four devices, 200/100 ms, 90 % each, 300 requests: prefill TP2, decode TP1, 1.56 a device."""
    asked = replace(
        question(4),
        load=replace(load(traffic(ttft_ms=200, tpot_ms=100), requests=300), pairs=PAIRS),
        goal=AttainmentGoal(joint=False),
        space=SearchSpace(tp=(1, 2, 4), mixed=False),
        reference=True,
    )
    best = answered(asked)[0].best()
    assert best is not None
    assert best.placement == disaggregated(InstanceShape(2), 1, InstanceShape(1), 1, 2048)
    assert best.per_device == pytest.approx(1.56, abs=0.1)


def test_too_few_requests_a_second_are_left_out() -> None:
    rates = sorted(each.goodput for each in answered(question(3))[0].ranked)
    least = rates[len(rates) // 2]
    answer, _ = answered(question(3, least_rate=least))
    assert [each for each in answer.ranked if each.goodput >= least] == answer.ranked != []
    assert any(f"of {least:g} requests/s" in line or "requests/s at most" in line for line in left_out(answer, 99))
    with pytest.raises(ValueError, match="no placement"):
        answered(question(1, least_rate=1000.0))


def test_objectives_that_nothing_meets_are_an_error() -> None:
    with pytest.raises(ValueError, match="misses its objective even without a queue"):
        answered(question(2, load=load(traffic(ttft_ms=1, tpot_ms=1))))


@pytest.mark.skipif(importlib.util.find_spec("pymoo") is None, reason="needs pymoo (extra `plan`)")
def test_a_space_too_large_to_walk_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flat:
        def compose(self, placement: CandidatePlacement):  # type: ignore[no-untyped-def]
            from deploy.planner.composing import ComposedFigures

            groups = placement.groups
            rate = min(group.devices for group in groups) * (2.0 if placement.split else 0.9)
            return ComposedFigures(
                rate,
                0.1 + 0.01 * groups[0].shape.tp,
                0.05,
            )

    asked = question(8, space=SearchSpace(tp=(1, 2), budgets=(512,)))
    from deploy.planner.candidates import placements

    every = list(placements(OPT, asked.machines, asked.space, [InstanceShape(1), InstanceShape(2)]))
    monkeypatch.setattr("deploy.planner.front.GENERATIONS", 8)
    walked, evolved = (shortlist(asked, every, Flat(), exact) for exact in (1000, 10))  # type: ignore[arg-type]
    assert evolved.evolved and not walked.evolved
    assert evolved.placements[0] == walked.placements[0]


def test_dominated_by_names_one_that_is_better() -> None:
    from deploy.planner.answer import PlannedPlacement

    def planned(rate: float, ttft: float) -> PlannedPlacement:
        found = Attainment(
            rate=rate, offered=10, ttft=1, tpot=1, joint=1, ttft_seconds=(ttft,) * 20, tpot_seconds=(0.05,) * 20
        )
        return PlannedPlacement(aggregated(InstanceShape(), 1, int(rate)), FoundGoodput(rate, {rate: found}), 1.0)

    good, fast, bad = planned(4, 0.2), planned(2, 0.1), planned(1, 0.3)
    mark_dominated([good, fast, bad])
    assert (good.dominated_by, fast.dominated_by) == (None, None)
    assert bad.dominated_by in (good.placement, fast.placement)


@pytest.mark.parametrize("limit", [0.4, 3.3, 11.0])
def test_rate_searches_end_near_the_limit(limit: float) -> None:
    for search, near in ((HalvingSearch(3, 0.9), 3 * 0.3125), (bracketing(2.0, AttainmentGoal(), 0.03), 0.03 * limit)):
        for _ in range(40):
            rate = search.next_rate()
            if rate is None:
                break
            search.record(rate, 1.0 if rate <= limit else 0.0)
        assert search.answer is None or limit - near - 1e-9 <= search.answer <= limit


def test_two_nodes_are_planned_with_units() -> None:
    asked = question(
        machines=Machines(nodes=2, devices_per_node=2),
        space=SearchSpace(tp=(1,), budgets=(512,), mixed=False),
        load=OfferedTraffic(traffic=traffic(), profile=OPT.profile(Machines(), InstanceShape()), requests=60),
    )
    answer, _ = answered(asked)
    unit = disaggregated(InstanceShape(), 1, InstanceShape(), 1, 512, 2)
    found = {each.placement: each for each in answer.ranked}
    assert found[unit].goodput == pytest.approx(2 * found[replace(unit, units=1)].goodput, rel=0.06)
    assert MODELS["opt-13b"] is OPT
