"""Chunks by slack: as far as the cost model knows a step ends before tokens are due, and prompts go on all the same."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.scheduler import DecodeScheduler
from kvcache.blocks.manager import KVCacheManager
from prefill.chunking import (
    ENOUGH,
    FLOOR,
    LEAN_STEPS,
    MOST_KEPT,
    RISE,
    YIELD_SHARE,
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


@pytest.mark.parametrize(("error", "known"), [(0.2, 0.2), (9.0, MOST_ERROR)])
@pytest.mark.parametrize("further", [0, 5, 400])
def test_the_models_error_is_left_as_room(error: float, known: float, further: int) -> None:
    """By a text that has gone on for a while: one that has only begun can make up for it later."""
    seq = row(100.0)
    step = Step(seq, cost=replace(COST, error=error))
    seq.tokens += [0] * further
    seq.computed += further
    step.prefill.add(row(tokens=2000))
    kept = min(1.0 - exp(-SPARED * known), RISE * (1 + further))
    assert predicted(*step.plan(0.1 * further)) == pytest.approx(0.1 * (1.0 - kept), abs=0.0015)


@pytest.mark.parametrize("output", [2, 4, 6, 10, ENOUGH, 2 * ENOUGH])
def test_answers_of_any_length_are_in_time_where_steps_vary_as_the_model_says(output: int) -> None:
    """Those of a few tokens keep slack from the first on: they could not make up for a step that takes too long."""
    assert sum(in_time_with_noise(output, seed) for seed in range(20)) >= 18


def in_time_with_noise(output: int, seed: int, error: float = 0.2) -> bool:
    """True if a text of so many tokens meets its TPOT beside prompts without end, each step off independently."""
    noise, seq, now = random.Random(seed), row(100.0, max_tokens=output), 0.0
    step = Step(seq, cost=replace(COST, error=error))
    for _ in range(output - 1):
        if not step.prefill.queue:
            step.prefill.add(row(tokens=2000))
        decoding, prompts = step.plan(now)
        now += predicted(decoding, prompts) * exp(noise.gauss(0.0, error))
        for work in (*decoding, *prompts):
            work.seq.computed += work.count
        seq.tokens.append(0)
        for work in prompts:
            if not work.seq.uncomputed:
                step.prefill.remove(work.seq)
                step.kv.release(work.seq)
    return now <= 0.1 * (output - 1)


@pytest.mark.parametrize("tpot_ms", [5.0, 11.0])
def test_the_pace_beside_a_tpot_that_cannot_be_met_is_that_of_its_pauses(tpot_ms: float) -> None:
    """Prompts are not taken for as slow as if each step could compute a few of their tokens."""
    step = Step(row(tpot_ms))
    step.prefill.add(row(tokens=2000))
    plan = StepPlan(BUDGET, 99)
    step.decode.fill(plan, 0.0)
    step.prefill.chunks.begin(plan, 0.0)
    assert step.prefill.chunks.usual(plan) > 15
    other = Step(row(tpot_ms), row(14.0))
    other.decode.fill(plan := StepPlan(BUDGET, 99), 0.0)
    other.prefill.chunks.begin(plan, 0.0)
    assert other.prefill.chunks.usual(plan) < 5, "nor for faster than others' TPOTs let them be"


@settings(max_examples=40, deadline=None)
@given(error=st.floats(0.0, MOST_ERROR), off=st.floats(-SPARED, 0.9 * SPARED))
def test_a_text_is_in_time_though_all_steps_take_longer_than_predicted(error: float, off: float) -> None:
    """By less than what is kept for; and beside prompts without end nearly all of its TPOT is used."""
    seq, cost, now = row(100.0), replace(COST, error=error), 0.0
    step = Step(seq, cost=cost)
    for tokens in range(1, 61):
        if not step.prefill.queue:
            step.prefill.add(row(tokens=2000))
        decoding, (prompt,) = step.plan(now)
        now += predicted(decoding, [prompt]) * exp(off * error)
        seq.tokens.append(0)
        seq.computed += 1
        prompt.seq.computed += prompt.count
        if not prompt.seq.uncomputed:
            step.prefill.remove(prompt.seq)
            step.kv.release(prompt.seq)
        assert now <= 0.1 * tokens or tokens * RISE < 1.0 - exp(-SPARED * error)
    assert off < 0.0 or now > 0.95 * 0.1 * 60


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
    paced = cost.paced_chunk(min(tpots) / 1e3, start, cost.seconds(beside), BUDGET - len(rows))
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


@given(st.floats(0.012, 0.042))
@settings(max_examples=60, deadline=None)
def test_no_sequence_is_slowed_down_for_prompts_that_go_on(slack: float) -> None:
    """Few tokens a step are enough where several steps come to FLOOR: a step of FLOOR would cost the next tokens."""
    step, given = Step(row(20.0)), []
    step.prefill.add(row(tokens=9000))
    for _ in range(6 * LEAN_STEPS):
        _, prompts = step.plan(0.04 - slack)
        given.append(sum(work.count for work in prompts))
        fits = COST.chunk_within(min(slack, GAP * 0.02), 0, StepLoad.of(0, 20), BUDGET)
        assert given[-1] <= max(fits, FLOOR - sum(given[-LEAN_STEPS:-1]))
    for at in range(len(given) - LEAN_STEPS):
        assert sum(given[at : at + LEAN_STEPS]) >= FLOOR


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
    priority=st.sampled_from([0, 100]),
)
def test_no_step_is_longer_than_slack_and_pauses_allow_and_prompts_always_go_on(
    tpots: list[float | None],
    contexts: list[int],
    prompts: list[int],
    now: float,
    budget: int,
    pair: float,
    priority: int,
) -> None:
    cost = replace(COST, pair=pair)
    step = Step(*(row(tpot, tokens) for tpot, tokens in zip(tpots, contexts, strict=False)), cost=cost)
    for tokens in prompts:
        step.prefill.add(row(tokens=tokens, priority=priority))
    progressed = 0
    for _ in range(LEAN_STEPS):
        decoding, given = step.plan(now, budget)
        tokens = sum(work.count for work in given)
        assert tokens + len(decoding) <= budget
        progressed += tokens
        bounds = [
            GAP * max(tpot / 1e3, cost.seconds(StepLoad.of(length, 1)))
            for tpot, length in zip(tpots, contexts, strict=False)
            if tpot is not None
        ]
        if tokens > FLOOR and bounds:
            assert predicted(decoding, given, cost) <= min(bounds) + 1e-9
    assert progressed >= min(FLOOR, budget - len(tpots), prompts[0])


def test_less_important_prompts_leave_what_sequences_are_early_by() -> None:
    """They slow them down to a share of their TPOT; a prompt as important may use all of it."""
    seq = row(100.0)
    step = Step(seq)
    seq.tokens += [0] * 9
    seq.computed += 9
    pace = YIELD_SHARE * 0.1
    step.prefill.add(row(tokens=2000, priority=1))
    decoding, prompts = step.plan(10 * pace - 0.05)
    assert 0.0485 < predicted(decoding, prompts) <= 0.05
    assert step.prompt_tokens(10 * pace) == 0, "only now and then"
    whole, goals = 80 + sum(work.count for work in prompts), step.prefill.queue[0].objectives
    goals.due = 9.0
    assert step.prompt_tokens(10 * pace - 0.05) > whole, "it is to be in time itself"
    goals.due, goals.priority = inf, 0
    assert step.prompt_tokens(10 * pace - 0.05) > whole


def test_what_is_kept_for_more_important_prompts_is_bounded() -> None:
    seq = row(100.0)
    step = Step(seq)
    seq.tokens += [0] * 899
    seq.computed += 899
    step.prefill.add(row(tokens=2000, priority=1))
    due = 900 * 0.1
    assert 0.0485 < predicted(*step.plan(due - MOST_KEPT * 0.1 - 0.05)) <= 0.05
    assert step.prompt_tokens(due - MOST_KEPT * 0.1) == 0


def test_nothing_is_kept_of_a_sequence_that_cannot_catch_up() -> None:
    late = row(100.0, max_tokens=11)
    step = Step(late, row(100.0, priority=1))
    late.tokens += [0] * 9
    late.computed += 9
    step.prefill.add(row(tokens=2000, priority=1))
    step.decode.running[1].objectives.origin += 5.0  # the other one is on time at second 5
    assert step.prompt_tokens(5.0) > FLOOR


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 400), st.none() | st.floats(1e-3, 1e4), st.integers(-2, 2)), min_size=1, max_size=5
    ),
    tpots=st.lists(st.none() | st.floats(1e-3, 500.0), max_size=3),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_whatever_is_asked_for_all_prompts_are_computed_in_the_end(
    prompts: list[tuple[int, float | None, int]], tpots: list[float | None], scale: float
) -> None:
    cost = StepCost(fixed=0.01 * scale, token=1e-3 * scale, pair=1e-7 * scale, context=1e-6 * scale, samples=9)
    step, now = Step(*map(row, tpots), cost=cost), 0.0
    for tokens, ttft_ms, priority in prompts:
        step.prefill.add(row(tokens=tokens, ttft_ms=ttft_ms, priority=priority))
    for _ in range(LEAN_STEPS * sum(tokens // FLOOR + 1 for tokens, _, _ in prompts)):
        if not step.prefill.queue:
            return
        decoding, given = step.plan(now)
        assert decoding or given, "a step of nothing is none: the engine would sleep"
        for work in given:
            work.seq.computed += work.count
            if not work.seq.uncomputed:
                step.prefill.remove(work.seq)
        now += predicted(decoding, given, cost)
    assert not step.prefill.queue


@pytest.mark.parametrize("tpot_ms", [1e-3, 1.0, 5.0, 11.0])
def test_a_tpot_that_no_step_is_short_enough_for_counts_as_the_least_that_is(tpot_ms: float) -> None:
    step = Step(row(tpot_ms), row(500.0))
    step.prefill.add(row(tokens=4000))
    least = COST.seconds(StepLoad.of(20, 1))
    for now in (0.0, 0.1):
        assert GAP * least - 0.0015 < predicted(*step.plan(now)) <= GAP * least
