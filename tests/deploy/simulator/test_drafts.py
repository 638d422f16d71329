"""Modelled drafts differ from text to text as measured ones do, change no token, and take what they are said to."""

from __future__ import annotations

from math import log
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cli import make_parser
from deploy.simulator.ablation import without
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.command import studies_of
from deploy.simulator.drafts import DraftModel, uniform
from deploy.simulator.profiles import PROFILES, StepWork
from deploy.simulator.run import SimulatedRun, simulate
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import TRAFFIC, trace
from serving.config import EngineConfig
from serving.messages import Role
from serving.step_cost import StepLoad

PLAN = ClusterPlan.of(PROFILES["cpu-smollm2"], (Role.MIXED, Role.PREFILL, Role.DECODE), "goodput", noise=0.0)
ARRIVALS = trace(TRAFFIC["chat"], PLAN.profile, 25, 1)


def played(plan: ClusterPlan, rate: float = 4.0) -> SimulatedRun:
    return simulate(plan, ARRIVALS, rate, seed=1)


def test_texts_differ_as_measured_ones_do() -> None:
    """1.9 tokens a step in the median, and 0.24 of its logarithm from text to text (docs/log.md)."""
    drafts, steps = DraftModel(), 33  # of a text of 64 tokens
    logs = []
    for seed in range(2000):
        share = drafts.share(seed * 0x51F15E)
        runs = [uniform(seed, number) for number in range(4 * steps)]
        taken = 0
        for step in range(steps):
            drawn = runs[4 * step : 4 * step + 4]
            taken += 1 + next((at for at, one in enumerate(drawn) if one >= share), 4)
        logs.append(taken / steps)
    assert median(logs) == pytest.approx(1.94, abs=0.06)
    assert pstdev([log(each) for each in logs]) == pytest.approx(0.24, abs=0.03)


@given(seed=st.integers(0, (1 << 32) - 1), position=st.integers(0, 4096))
def test_draws_lie_between_0_and_1(seed: int, position: int) -> None:
    assert 0.0 < uniform(seed, position) < 1.0


def test_draws_are_even() -> None:
    drawn = [uniform(seed, position) for seed in range(40) for position in range(100)]
    assert fmean(drawn) == pytest.approx(0.5, abs=0.02)
    assert pstdev(drawn) == pytest.approx(12**-0.5, abs=0.01)


def test_drafts_change_no_token_and_save_steps() -> None:
    texts = ScriptedTexts({each.request.request_id: each.output_tokens for each in ARRIVALS})
    plain, drafted = played(PLAN), played(PLAN.with_drafts(DraftModel(right=0.7)))
    for done in (plain, drafted):
        written = [texts.written_out(each.request) for each in ARRIVALS]
        assert [outcome.tokens for outcome in done.outcomes] == written
        assert not any(any(audit.counts.values()) for audit in done.audits)
    paces = [median([outcome.tpot for outcome in done.outcomes if outcome.tpot]) for done in (plain, drafted)]
    assert paces[1] < 0.75 * paces[0], "most of what is drafted is right, and steps cost mostly the same"


def test_wrong_drafts_cost_little_since_they_are_given_up() -> None:
    paces = [
        median([outcome.tpot for outcome in played(plan).outcomes if outcome.tpot])
        for plan in (PLAN, PLAN.with_drafts(DraftModel(right=0.01, spread=0.0)))
    ]
    assert paces[0] < paces[1] < 1.15 * paces[0]


@given(computed=st.integers(0, 2000), drafted=st.integers(0, 8))
def test_a_decode_with_drafts_is_the_load_that_workers_count(computed: int, drafted: int) -> None:
    work = StepWork()
    work.add_decode(computed, drafted)
    counted = StepLoad.of(computed, 1 + drafted)
    assert (work.load.new_tokens, work.load.pairs, work.load.sequences) == (
        counted.new_tokens,
        counted.pairs,
        counted.sequences,
    )


def test_drafts_are_asked_for_and_switched_off() -> None:
    options = make_parser().parse_args(["simulate", "--drafts", "0.6", "--without", "drafts"])
    whole, off = (study.plan for study in studies_of(options).values())
    assert whole.drafts == DraftModel(right=0.6)
    assert whole.engine.num_speculative_tokens == EngineConfig().num_speculative_tokens
    assert off.drafts is None and off.engine.num_speculative_tokens == 0
    with pytest.raises(ValueError, match="--without drafts"):
        without(PLAN, "drafts")
    with pytest.raises(ValueError, match="--drafts"):
        studies_of(make_parser().parse_args(["simulate", "--drafts", "1.5"]))
