"""Chunks by slack: as far as the cost model knows a step ends before tokens are due, and prompts go on all the same."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import DecodeScheduler
from kvcache.blocks.manager import KVCacheManager
from prefill.chunking import (
    FLOOR,
    HURRY_SHARE,
    LATELY,
    LEAN_STEPS,
    MOST_HURRIED,
    SlackChunks,
)
from prefill.scheduler import PrefillScheduler
from serving.engine.plan import StepPlan, Work
from serving.engine.sequence import SequenceState
from serving.messages import Slo
from serving.step_cost import GAP, MOST_ERROR, SPARED, StepCost, StepLoad
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_kv

COST = StepCost(fixed=0.01, token=0.001, pair=1e-7, sequence=0.0005, context=1e-6, error=0.0, samples=100)
BUDGET = 512


class Step:
    """A mixed worker's two schedulers; every sequence in `running` has just had its first token, at second 0."""

    def __init__(self, *running: SequenceState, cost: StepCost | None = COST, kv: KVCacheManager | None = None):
        self.kv = kv or make_kv(1000, 16, caching=False)
        self.decode = DecodeScheduler(self.kv, max_model_len=16_000)
        self.prefill = PrefillScheduler(self.kv, chunks=SlackChunks(lambda: cost))
        for seq in running:
            self.join(seq)

    def join(self, seq: SequenceState, now: float = 0.0) -> None:
        self.kv.open(seq)
        seq.computed = len(seq.tokens)
        seq.tokens.append(0)
        seq.incoming.prefilled_here = True
        self.decode.add(seq)
        self.decode.fill(StepPlan(BUDGET, 99), now)

    def plan(self, now: float, tokens: int = BUDGET) -> tuple[list[Work], list[Work]]:
        """What decodes and what is prefilled."""
        plan = StepPlan(tokens, 99)
        self.decode.fill(plan, now)
        decoding = list(plan.work)
        self.prefill.fill(plan, now)
        return decoding, plan.work[len(decoding) :]

    def prompt_tokens(self, now: float) -> int:
        return sum(work.count for work in self.plan(now)[1])


def row(
    tpot_ms: float | None = None,
    tokens: int = 20,
    max_tokens: int = 1000,
    ttft_ms: float | None = None,
    **fields: Any,
) -> SequenceState:
    return make_sequence(
        None, [1] * tokens, slo=Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms), max_tokens=max_tokens, stays=True, **fields
    )


def predicted(decoding: list[Work], prompts: list[Work], cost: StepCost = COST) -> float:
    load = StepLoad()
    for work in [*decoding, *prompts]:
        load += StepLoad.of(work.seq.computed, work.count)
    return cost.seconds(load)


@pytest.mark.parametrize(
    ("rows", "cost"),
    [
        ([row()], COST),
        ([], COST),
        ([row(50.0)], None),
        ([row(50.0)], replace(COST, samples=0)),
    ],
    ids=["no objectives", "nothing decodes", "no model", "a model of no samples"],
)
def test_it_is_the_fixed_budget(rows: list[SequenceState], cost: StepCost | None) -> None:
    step = Step(*(row(None if seq.objectives.tpot > 1 else 50.0) for seq in rows), cost=cost)
    step.prefill.add(row(tokens=2000))
    assert step.prompt_tokens(0.0) == BUDGET - len(rows)


def test_a_step_ends_when_the_first_token_is_due() -> None:
    step = Step(row(200.0), row(100.0), row())
    step.prefill.add(row(tokens=2000))
    decoding, prompts = step.plan(0.01)
    assert len(decoding) == 3 and 0.0885 < predicted(decoding, prompts) <= 0.09


def test_it_may_be_shared_by_several_prompts() -> None:
    step = Step(row(100.0))
    for _ in range(4):
        step.prefill.add(row(tokens=30))
    decoding, prompts = step.plan(0.0)
    assert [work.count for work in prompts[:2]] == [30, 30] and 0 < prompts[2].count < 30
    assert 0.0985 < predicted(decoding, prompts) <= 0.1


def test_what_a_sequence_is_early_by_may_be_used_up_to_a_bound() -> None:
    seq = row(100.0)
    step = Step(seq)
    step.prefill.add(row(tokens=2000))
    for ahead, seconds in ((1, 0.2), (99, GAP * 0.1)):
        seq.tokens += [0] * ahead
        seq.computed += ahead
        decoding, prompts = step.plan(0.0)
        assert seconds - 0.0015 < predicted(decoding, prompts) <= seconds


def test_the_models_error_is_left_as_room() -> None:
    for error, known in ((0.2, 0.2), (9.0, MOST_ERROR)):
        step = Step(row(100.0), cost=replace(COST, error=error))
        step.prefill.add(row(tokens=2000))
        assert predicted(*step.plan(0.0)) == pytest.approx(0.1 * exp(-SPARED * known), abs=0.0015)


@given(
    tpots=st.lists(st.floats(60.0, 400.0), min_size=1, max_size=12),
    start=st.integers(0, 3000),
    error=st.floats(0.0, 1.0),
)
def test_what_routers_take_a_chunk_for_is_the_chunk(tpots: list[float], start: int, error: float) -> None:
    """Beside sequences that are early: `StepCost.paced_chunk` is what the step of a worker comes to."""
    cost, rows = replace(COST, error=error), [row(tpot) for tpot in tpots]
    step, prompt = Step(*rows, cost=cost), row(tokens=8000)
    for seq in rows:
        seq.tokens += [0] * 40
        seq.computed += 40
    step.prefill.add(prompt)
    step.kv.open(prompt)
    prompt.computed, prompt.prefill.scheduled_at = start, 0.0
    decoding, (chunk,) = step.plan(0.0)
    context = sum(len(seq.tokens) for seq in rows)
    beside = StepLoad(len(rows), context, len(rows), context)
    paced = cost.paced_chunk(min(tpots) / 1e3, start, beside, BUDGET - len(rows))
    assert len(decoding) == len(rows) and paced > FLOOR
    assert chunk.count == pytest.approx(paced, abs=1)


def test_prompts_go_on_beside_sequences_without_slack() -> None:
    step = Step(row(20.0))
    prompt = row(tokens=2000)
    step.prefill.add(prompt)
    counts = [step.prompt_tokens(0.02) for _ in range(3 * LEAN_STEPS)]
    assert counts == ([0] * (LEAN_STEPS - 1) + [FLOOR]) * 3
    prompt.computed = 1990
    assert [step.prompt_tokens(0.02) for _ in range(LEAN_STEPS)][-1] == 10


@pytest.mark.parametrize("hopeless", ["late first token", "cannot catch up"])
def test_who_has_missed_bounds_pauses_alone(hopeless: str) -> None:
    """60 ms a token, and two tokens to go: half a second is not made up for."""
    late = row(60.0, max_tokens=3, first_token_in=-0.1 if hopeless == "late first token" else 1.0)
    step = Step(late)
    step.prefill.add(row(tokens=2000))
    now = 0.0 if hopeless == "late first token" else 0.5
    assert GAP * 0.06 - 0.0015 < predicted(*step.plan(now)) <= GAP * 0.06


def test_who_can_catch_up_is_waited_for() -> None:
    step = Step(row(60.0, max_tokens=100))
    step.prefill.add(row(tokens=2000))
    assert step.prompt_tokens(0.5) == 0


@settings(max_examples=150, deadline=None)
@given(
    tpots=st.lists(st.one_of(st.none(), st.floats(1.0, 500.0)), min_size=1, max_size=12),
    contexts=st.lists(st.integers(1, 300), min_size=12, max_size=12),
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=4),
    now=st.floats(0.0, 0.3),
    budget=st.integers(16, 600),
    pair=st.sampled_from([0.0, 1e-7, 1e-6]),
)
def test_no_step_is_longer_than_slack_and_pauses_allow_and_prompts_always_go_on(
    tpots: list[float | None], contexts: list[int], prompts: list[int], now: float, budget: int, pair: float
) -> None:
    cost = replace(COST, pair=pair)
    step = Step(*(row(tpot, tokens) for tpot, tokens in zip(tpots, contexts, strict=False)), cost=cost)
    for tokens in prompts:
        step.prefill.add(row(tokens=tokens))
    progressed = 0
    for _ in range(LEAN_STEPS):
        decoding, given = step.plan(now, budget)
        tokens = sum(work.count for work in given)
        assert tokens + len(decoding) <= budget
        progressed += tokens
        bounds = [GAP * tpot / 1e3 for tpot in tpots if tpot is not None]
        if tokens > FLOOR and bounds:
            assert predicted(decoding, given, cost) <= min(bounds) + 1e-9
    assert progressed >= min(FLOOR, budget - len(tpots), prompts[0])


def test_steps_are_short_for_the_next_prompt_of_those_more_important() -> None:
    """It waits for the step that runs when it comes, and nothing in that step is due."""
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    batch, urgent = row(tokens=4000, priority=1), row(tokens=50, ttft_ms=1000.0)

    def most(seq: SequenceState, now: float) -> int:
        chunks.begin(plan, now)
        return chunks.most(seq, plan)

    assert most(batch, 0.0) == BUDGET, "nobody more important has come yet"
    assert most(urgent, 1.0) == BUDGET
    count = most(batch, 2.0)
    assert 0 < count < BUDGET and COST.seconds(StepLoad.of(0, count)) <= HURRY_SHARE
    assert most(row(tokens=4000), 2.0) == BUDGET, "one as important is not held back"
    assert most(batch, LATELY + 0.9) < BUDGET == most(batch, LATELY + 1.1)


def test_what_is_remembered_of_hurried_prompts_is_bounded() -> None:
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    for number in range(10 * MOST_HURRIED):
        chunks.begin(plan, float(number))
        chunks.most(row(tokens=50, ttft_ms=1000.0, priority=number), plan)
    assert len(chunks._hurried) == MOST_HURRIED
