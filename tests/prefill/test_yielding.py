"""Prompts that yield to more important sequences: others pass them meanwhile, they never starve, and that is cheap."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.chunking import FLOOR, LEAN_STEPS, MOST_KEPT, YIELD_SHARE, yielding_slack
from prefill.ordering import SlackOrder
from serving.engine.ageing import AGE, STEP
from serving.engine.plan import StepPlan, Work
from serving.engine.sequence import SequenceState
from tests.prefill.test_chunking import BUDGET, COST, Step, predicted, row

DUE = 30.0  # seconds after it came that an interactive prompt is


def interactive(came: float, tokens: int = 60) -> SequenceState:
    seq = row(100.0, tokens, ttft_ms=1e3 * DUE)
    seq.prefill.waiting_since, seq.objectives.due = came, came + DUE
    return seq


def aged(tokens: int = 4000) -> SequenceState:
    """So long in the queue that it is before whatever comes at second 0."""
    seq = row(tokens=tokens, priority=STEP)
    seq.prefill.waiting_since = -2 * AGE
    return seq


def beside_a_text(ahead: float) -> Step:
    """A worker that orders by slack, with a text so many tokens early at second 0, each of which takes 100 ms."""
    step = Step(row(100.0))
    step.prefill.order = SlackOrder(lambda: COST)
    running = step.decode.running[0]
    running.tokens += [0] * 10
    running.computed += 10
    running.objectives.origin = 0.1 * (ahead - len(running.tokens))
    return step


@pytest.mark.parametrize("priority", [STEP, 3 * STEP])
def test_a_prompt_that_yields_is_passed_by_prompts_that_need_not(priority: int) -> None:
    """However it came to the head of the queue: whoever is behind it would wait for nobody's good."""
    step, batch, prompt = beside_a_text(ahead=2.0), aged(), interactive(0.0)
    batch.objectives.priority, batch.prefill.waiting_since = priority, -AGE * (1 + priority / STEP)
    step.prefill.add(prompt)
    step.prefill.add(batch)
    assert [work.seq for work in step.plan(0.0)[1]] == [prompt]
    assert step.prefill.queue[0] is batch


def test_they_have_no_more_than_they_would_without_it() -> None:
    alone, together = beside_a_text(ahead=1.5), beside_a_text(ahead=1.5)
    together.prefill.add(aged())
    for step in (alone, together):
        step.prefill.add(interactive(0.0, tokens=1000))
    (one,), (two,) = alone.plan(0.0)[1], together.plan(0.0)[1]
    assert FLOOR < one.count == two.count < BUDGET - 1


def test_where_nobody_has_room_nobody_is_asked_in_vain() -> None:
    step = beside_a_text(ahead=0.0)
    for seq in [aged(), *(interactive(0.0) for _ in range(50))]:
        step.prefill.add(seq)
    asked: list[SequenceState] = []
    most = step.prefill.chunks.most

    def counted(seq: SequenceState, plan: StepPlan) -> int:
        asked.append(seq)
        return most(seq, plan)

    step.prefill.chunks.most = counted  # type: ignore[method-assign]
    assert step.prompt_tokens(0.0) == 0 and len(asked) <= 2


@settings(max_examples=60, deadline=None)
@given(
    slacks=st.lists(st.floats(0.0, 4.0), min_size=4 * LEAN_STEPS, max_size=4 * LEAN_STEPS), tokens=st.integers(1, 90)
)
def test_a_prompt_that_is_passed_all_the_time_goes_on(slacks: list[float], tokens: int) -> None:
    """As fast as any prompt does beside sequences that leave it nothing."""
    step, batch = beside_a_text(ahead=0.0), aged()
    running = step.decode.running[0]
    step.prefill.add(batch)
    given = []
    for ahead in slacks:
        prompt = interactive(0.0, tokens)
        step.prefill.add(prompt)
        running.objectives.origin = 0.1 * (ahead - len(running.tokens))
        given.append(sum(work.count for work in step.plan(0.0)[1] if work.seq is batch))
        step.prefill.remove(prompt)
        step.kv.release(prompt)
    for at in range(len(given) - LEAN_STEPS + 1):
        assert sum(given[at : at + LEAN_STEPS]) >= FLOOR


def test_interactive_prompts_are_in_time_beside_aged_ones() -> None:
    """Nine texts, a prompt a second, and ten of batch that have waited too long already."""
    step = Step(*(row(60.0, tokens=200) for _ in range(9)))
    step.prefill.order = SlackOrder(lambda: COST)
    for _ in range(10):
        step.prefill.add(aged(tokens=500))
    coming, waits, now, came = 1.0, [], 0.0, dict[SequenceState, float]()
    while now < 12.0:
        if now >= coming:
            prompt = interactive(coming)
            prompt.objectives.due = coming + 1.0
            step.prefill.add(prompt)
            came[prompt], coming = coming, coming + 1.0
        decoding, prompts = step.plan(now)
        now += predicted(decoding, prompts)
        for work in [*decoding, *prompts]:
            work.seq.computed += work.count
            if work in decoding:
                work.seq.tokens.append(0)
            elif not work.seq.uncomputed:
                step.prefill.remove(work.seq)
                step.kv.release(work.seq)
                if work.seq in came:
                    waits.append(now - came[work.seq])
    assert len(waits) >= 10 and max(waits) < 1.0
    assert not any(seq.objectives.late(len(seq.tokens), now) for seq in step.decode.running)


class Counted(list[Work]):
    """Work of a plan that counts how often all of it is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Work]:
        self.looks += 1
        return super().__iter__()


def looks(priorities: int) -> int:
    """Passes over what decodes that one step takes, beside short prompts of so many priorities."""
    step = Step(*(row(400.0) for _ in range(20)))
    for number in range(60):
        step.prefill.add(row(tokens=1, priority=1 + number % priorities))
    work = Counted()
    plan = StepPlan(BUDGET, 99, work=work)
    step.decode.fill(plan, 0.0)
    step.prefill.fill(plan, 0.0)
    assert len(work) == 80
    return work.looks


def test_rows_are_looked_at_as_often_for_many_priorities_as_for_one() -> None:
    assert looks(60) == looks(1) < 10


@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.none() | st.floats(20.0, 300.0), st.integers(0, 60)), max_size=12),
    now=st.floats(0.0, 3.0),
)
def test_what_is_left_to_a_prompt_is_the_least_that_more_important_sequences_leave(
    rows: list[tuple[int, float | None, int]], now: float
) -> None:
    plan, expected = StepPlan(BUDGET, 99), dict[int, float]()
    for priority, tpot_ms, output in rows:
        seq = row(tpot_ms, priority=priority, max_tokens=10_000)
        seq.tokens += [0] * (output + 1)
        seq.objectives.begin(seq.start + 1, 0, 0.0)
        plan.work.append(Work(seq, 1, None))  # type: ignore[arg-type]
        if tpot_ms is None:
            continue
        kept = min(MOST_KEPT, (1.0 - YIELD_SHARE) * seq.output_len)
        left = max(0.0, seq.objectives.slack(len(seq.tokens), now) - kept * tpot_ms / 1e3)
        for asks in range(priority + 1, 5):
            expected[asks] = min(left, expected.get(asks, inf))
    found = yielding_slack(plan, now, alone=0.01)
    for asks in range(-4, 5):
        least = min((seconds for priority, seconds in found if priority < asks), default=inf)
        assert least == pytest.approx(expected.get(asks, inf))
    assert [priority for priority, _ in found] == sorted({priority for priority, _ in found})
