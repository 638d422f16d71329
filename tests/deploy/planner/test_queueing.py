"""The queueing model against what is known of queues, of DistServe's simulator, and of the classes that serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.planner.attainment import P90, AttainmentGoal, OfferedTraffic, offered
from deploy.planner.machines import MODELS, Machines
from deploy.planner.placements import CandidatePlacement, InstanceGroup, InstanceShape, aggregated, disaggregated
from deploy.planner.queueing import QueueingModel, QueueingRules
from deploy.planner.simulated import SimulatedModel
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass
from serving.messages import Role
from tests.deploy.planner.questions import OPT, load

ONE, TWO = InstanceShape(1), InstanceShape(2)
PAIRS = tuple(
    (prompt, output) for prompt, output in json.loads((Path(__file__).parent / "sharegpt_300.json").read_text())
)
ANY = AttainmentGoal(share=0.0)


def model(**rules: object) -> QueueingModel:
    profiles = tuple((shape, OPT.profile(Machines(), shape)) for shape in (ONE, TWO, InstanceShape(1, 2)))
    return QueueingModel(profiles, replace(QueueingRules(kv_bytes=OPT.kv_bytes, layers=OPT.layers), **rules))  # type: ignore[arg-type]


def fixed(prompt: float, output: float) -> Traffic:
    kind = TrafficClass(prompt=Lengths(prompt), output=Lengths(output), ttft_ms=1e9, tpot_ms=1e9)
    return Traffic(name="fixed", classes=(kind,))


def test_equal_prompts_wait_as_in_an_m_d_1_queue() -> None:
    """86.2 ms at 3 a second and 75.2 ms each: D + R·D²/(2·(1 − R·D)). A step holds one prompt."""
    group = InstanceGroup(Role.PREFILL, ONE, 1, 512)
    found = model().phase(group, load(fixed(512, 64), 4000), 3.0, 0, ANY)
    mean = sum(found.ttft_seconds) / len(found.ttft_seconds)
    assert mean == pytest.approx(0.0862, rel=0.05)


@pytest.mark.parametrize(
    ("prefill", "rate", "ttft", "tpot"), [(ONE, 3.0, 0.1345, 0.02596), (TWO, 6.0, 0.0953, 0.02810)]
)
def test_under_the_reference_assumptions_figures_are_the_references(
    prefill: InstanceShape, rate: float, ttft: float, tpot: float
) -> None:
    """p90 of 512 in, 64 out: one draw of 600 requests there, the mean of five here."""
    placement = disaggregated(prefill, 1, ONE, 1, 0)
    made = load(fixed(512, 64), 600)
    runs = [model(reference=True).attainment(placement, made, rate, seed, ANY) for seed in range(5)]
    assert sum(run.ttft_p90 for run in runs) / 5 == pytest.approx(ttft, rel=0.1)
    assert sum(run.tpot_p90 for run in runs) / 5 == pytest.approx(tpot, rel=0.04)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 30), st.floats(0.5, 0.95), st.booleans(), st.booleans(), st.integers(1, 2))
def test_a_run_is_given_up_just_where_it_misses_its_goal(
    rate: float, share: float, joint: bool, split: bool, count: int
) -> None:
    goal, made = AttainmentGoal(share=share, joint=joint), load(requests=60)
    placement = disaggregated(ONE, count, ONE, 1, 512) if split else aggregated(ONE, count, 512)
    whole = model().attainment(placement, made, rate, 0, replace(goal, share=0.0))
    early = model().attainment(placement, made, rate, 0, goal)
    assert (goal.of(early) >= share) == (goal.of(whole) >= share)
    if early.given_up:
        assert goal.of(early) >= goal.of(whole)
    else:
        assert early == whole


@settings(max_examples=15, deadline=None)
@given(st.sampled_from((1, 2)), st.sampled_from((ONE, InstanceShape(1, 2))), st.floats(1, 40), st.booleans())
def test_every_request_ends_after_its_steps(count: int, shape: InstanceShape, rate: float, split: bool) -> None:
    placement = disaggregated(shape, count, shape, count, 512) if split else aggregated(shape, count, 512)
    found = model().attainment(placement, load(requests=60), rate, 0, ANY)
    step = OPT.profile(Machines(), ONE).decode_seconds(1, 1)
    assert max(found.ttft_seconds + found.tpot_seconds) < float("inf")
    assert found.tpot_seconds[0] >= step * 0.99
    assert list(found.ttft_seconds) == sorted(found.ttft_seconds)


def test_full_kv_lets_requests_wait() -> None:
    tight = tuple((shape, replace(profile, kv_tokens=600)) for shape, profile in model().profiles)
    placement, made = aggregated(ONE, 1, 512), load(requests=60)
    free = model().attainment(placement, made, 8.0, 0, ANY)
    full = replace(model(), profiles=tight).attainment(placement, made, 8.0, 0, ANY)
    assert full.ttft_p90 > 2 * free.ttft_p90


def test_slow_links_are_felt_in_tpot() -> None:
    placement, made = disaggregated(ONE, 1, ONE, 1, 512), load(requests=60)
    fast = model(link_bytes_per_second=300e9).attainment(placement, made, 4.0, 0, ANY)
    slow = model(link_bytes_per_second=1e9).attainment(placement, made, 4.0, 0, ANY)
    assert slow.tpot_seconds[P90] > fast.tpot_seconds[P90] * 1.5
    assert slow.ttft_seconds == fast.ttft_seconds


def test_stages_share_the_work_of_prompts() -> None:
    """Two stages take in prompts nearly twice as fast; one alone takes no less time."""
    made = load(fixed(512, 2), 200)
    one, two = (
        model().phase(InstanceGroup(Role.PREFILL, shape, 1, 512), made, 20.0, 0, ANY)
        for shape in (ONE, InstanceShape(1, 2))
    )
    assert one.ttft_p90 > 1.5 * two.ttft_p90
    idle = [
        model().phase(InstanceGroup(Role.PREFILL, shape, 1, 512), made, 0.1, 0, ANY).ttft_seconds[0]
        for shape in (ONE, InstanceShape(1, 2))
    ]
    assert idle[0] <= idle[1] < idle[0] * 1.1


@pytest.mark.parametrize("placement", [disaggregated(TWO, 1, ONE, 1, 512), aggregated(TWO, 1, 512)], ids=str)
def test_queues_are_near_the_classes_that_serve(placement: CandidatePlacement) -> None:
    made = load(requests=100)
    queues = model().attainment(placement, made, 4.0, 0, ANY)
    served = SimulatedModel(model().profiles, 300e9).attainment(placement, made, 4.0, 0, ANY)
    assert queues.ttft_p90 == pytest.approx(served.ttft_p90, rel=0.3)
    assert queues.tpot_p90 == pytest.approx(served.tpot_p90, rel=0.3)
    assert offered(made, 4.0, 0).prompt == [len(each) for each in _prompts(made)]


def _prompts(made: OfferedTraffic) -> list[tuple[int, ...]]:
    from deploy.planner.attainment import arriving

    return [each.request.prompt for each in arriving(made, made.count(4.0), 0)]


def test_a_hopeless_simulation_ends_early() -> None:
    made = load(requests=100)
    found = SimulatedModel(model().profiles, 300e9).attainment(aggregated(ONE, 1, 512), made, 60.0, 0, AttainmentGoal())
    assert found.given_up and found.joint < 0.9


def test_pairs_of_a_file_are_asked_for_in_their_order() -> None:
    made = replace(load(), pairs=PAIRS)
    assert offered(made, 1.0, 0).prompt[:3] == [55, 829, 697]
    assert offered(made, 1.0, 0).at != offered(made, 1.0, 1).at


def test_longer_runs_come_with_higher_rates() -> None:
    made = replace(load(requests=100), seconds=60.0)
    assert [made.count(rate) for rate in (1.0, 2.0, 10.0)] == [100, 300, 600]


def test_every_known_model_has_a_worker_of_one_node() -> None:
    assert all(known.kv_tokens(Machines(), InstanceShape(8)) > 0 for known in MODELS.values())
