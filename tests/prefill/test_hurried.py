"""Steps of prompts are short where the next prompt to come would go first, and not for those that pass nobody."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from prefill.chunking import FLOOR, HURRIED_STEPS, HURRY_SHARE, LATELY, MOST_HURRIED, SlackChunks
from prefill.ordering import SlackOrder
from serving.engine.ageing import AGE
from serving.engine.plan import StepPlan
from serving.engine.sequence import SequenceState
from serving.messages import Slo
from serving.step_cost import StepLoad
from tests.fakes.sequences import make_sequence
from tests.prefill.test_chunking import BUDGET, COST, Step, predicted, row


def test_steps_are_short_for_the_next_prompt_of_those_more_important() -> None:
    """It waits for the step that runs when it comes, and nothing in that step is due."""
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    batch, urgent = row(tokens=4000, priority=1), row(tokens=50, ttft_ms=1000.0, first_token_in=2.0)

    def most(seq: SequenceState, now: float) -> int:
        chunks.begin(plan, now)
        return chunks.most(seq, plan)

    assert most(batch, 0.0) == BUDGET, "nobody more important has come yet"
    assert most(urgent, 1.0) == BUDGET
    count = most(batch, 2.0)
    assert 0 < count < BUDGET and COST.seconds(StepLoad.of(0, count)) <= HURRY_SHARE
    later = row(tokens=4000, priority=1, now=LATELY)
    assert most(later, LATELY + 0.9) < BUDGET == most(later, LATELY + 1.1)


@pytest.mark.parametrize(
    ("ttft_ms", "first_token_in", "priority", "short"),
    [
        (900.0, 0.9, 0, False),
        (1000.0, 1.0, 0, False),
        (6000.0, 6.0, 0, True),
        (6000.0, 6.0, -1, False),
        (6000.0, -0.1, 0, True),
        (1000.0, -0.1, 0, True),
        (None, None, 0, True),
    ],
)
def test_steps_are_short_for_the_next_prompt_that_goes_first(
    ttft_ms: float | None, first_token_in: float | None, priority: int, short: bool
) -> None:
    """A second is allowed to those that come: they go before what is due later, and before what is late."""
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    chunks.begin(plan, 0.0)
    chunks.most(row(tokens=50, ttft_ms=1000.0, first_token_in=1.0), plan)
    chunks.begin(plan, 0.0)
    seq = row(tokens=600, ttft_ms=ttft_ms, first_token_in=first_token_in, priority=priority)
    count = chunks.most(seq, plan)
    assert (count < BUDGET) == short
    assert not short or 0.9 * HURRY_SHARE < COST.seconds(StepLoad.of(0, count)) <= HURRY_SHARE


def test_steps_are_short_for_the_next_prompt_that_passes_one_left_out() -> None:
    """It is due sooner and could be in time by itself, but is left out for others: it goes behind whatever comes."""
    order, chunks, plan = SlackOrder(lambda: COST), SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    chunks.begin(plan, 0.0)
    chunks.most(row(tokens=50, ttft_ms=1000.0, first_token_in=1.0), plan)
    long = row(tokens=700, ttft_ms=900.0, first_token_in=0.9)
    others = [row(tokens=200, ttft_ms=950.0, first_token_in=0.95) for _ in range(2)]
    for queue, short in (([long], False), ([long, *others], True), ([long], False)):
        order.sort(queue, BUDGET, (), 0.0)
        chunks.begin(plan, 0.0)
        assert (chunks.most(long, plan) < BUDGET) == short


def test_who_has_waited_for_long_goes_first_and_in_whole_steps() -> None:
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    batch = row(tokens=4000, priority=50)
    for now, short in ((0.0, True), (AGE + 1.0, False)):
        chunks.begin(plan, now)
        chunks.most(make_sequence(None, [0] * 50, now=now, slo=Slo(ttft_ms=1000.0), first_token_in=1.0), plan)
        chunks.begin(plan, now)
        assert (chunks.most(batch, plan) < BUDGET) == short


def test_an_objective_that_nothing_can_meet_shortens_no_steps() -> None:
    """Such prompts are late when they come, and pass nobody: else anyone could slow everybody down."""
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    chunks.begin(plan, 0.0)
    chunks.most(row(tokens=50, ttft_ms=1.0, first_token_in=0.001), plan)
    chunks.begin(plan, 0.0)
    assert chunks.most(row(tokens=4000, ttft_ms=9e4, first_token_in=90.0), plan) == BUDGET


@pytest.mark.parametrize("ttft_ms", [0.0, -1.0, 5e-324, 1e308, inf, float("nan")])
def test_no_objective_breaks_a_step(ttft_ms: float) -> None:
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    for _ in range(2):
        chunks.begin(plan, 0.0)
        assert chunks.most(row(tokens=4000, ttft_ms=ttft_ms), plan) >= FLOOR


@pytest.mark.parametrize("start", [0, 10_000, 100_000])
def test_a_deep_prompt_in_short_steps_goes_not_much_slower(start: int) -> None:
    """What reading its own context takes is no reason to compute next to nothing of it."""
    cost = replace(COST, token=1e-4, context=1e-6)
    chunks, plan = SlackChunks(lambda: cost), StepPlan(2048, 99)
    chunks.begin(plan, 0.0)
    chunks.most(row(tokens=10, ttft_ms=50.0, first_token_in=0.05), plan)
    chunks.begin(plan, 0.0)
    deep = row(tokens=start + 4000, ttft_ms=9e4, first_token_in=90.0)
    deep.computed = start
    count = chunks.most(deep, plan)
    slower = cost.seconds(StepLoad.of(start, count)) / count / (cost.seconds(StepLoad.of(start, 2048)) / 2048)
    assert count < 2048 and slower < 2.5


@pytest.mark.parametrize("ttft_ms", [1e-3, 20.0, 60.0])
def test_a_hurry_that_no_step_is_short_enough_for_stops_nobody(ttft_ms: float) -> None:
    """A step that computes nothing is none: the engine would sleep, and the prompt wait until something wakes it."""
    step = Step()
    step.prefill.add(row(tokens=10, ttft_ms=ttft_ms))
    assert step.prompt_tokens(0.0) == 10
    step.prefill.queue.clear()
    step.prefill.add(row(tokens=4000, priority=1))
    assert step.prompt_tokens(0.1) >= FLOOR

    beside = Step(row(), row())
    beside.prefill.chunks.most(row(tokens=10, ttft_ms=ttft_ms), StepPlan(BUDGET, 99))
    beside.prefill.add(row(tokens=4000, priority=1))
    decoding, prompts = beside.plan(0.1)
    assert prompts and predicted(decoding, prompts) >= HURRIED_STEPS * predicted(decoding, []) - 0.0015


def test_what_is_remembered_of_hurried_prompts_are_the_latest() -> None:
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    for number in range(MOST_HURRIED + 1):
        chunks.begin(plan, float(number))
        chunks.most(row(tokens=50, ttft_ms=100.0, first_token_in=0.1, priority=number, now=float(number)), plan)
    now = MOST_HURRIED + LATELY - 0.5
    chunks.begin(plan, now)
    assert chunks.most(row(tokens=4000, priority=9000, now=now), plan) < BUDGET, "the last of them is remembered"
    assert chunks.most(row(tokens=4000, priority=MOST_HURRIED - 1, now=now), plan) == BUDGET, "and no other"


def test_what_is_remembered_of_hurried_prompts_is_bounded() -> None:
    chunks, plan = SlackChunks(lambda: COST), StepPlan(BUDGET, 99)
    for number in range(10 * MOST_HURRIED):
        chunks.begin(plan, float(number))
        chunks.most(row(tokens=50, ttft_ms=1000.0, priority=number), plan)
    assert len(chunks._hurried) == MOST_HURRIED
