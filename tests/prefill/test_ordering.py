"""The order of prompts: as they came without objectives; else by class and slack, and nobody is passed by for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.ordering import UNHURRIED, PromptOrder, SlackOrder, due_of, left_out
from prefill.scheduler import PrefillScheduler
from serving.engine.ageing import AGE, STEP, level_of
from serving.engine.plan import StepPlan, Work
from serving.engine.sequence import SequenceState
from serving.service_class import SERVICE_CLASSES
from serving.step_cost import StepCost
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_kv

COST = StepCost(fixed=0.01, token=0.001, samples=100)


def prompt(tokens: int = 10, at: float = 0.0, **fields: Any) -> SequenceState:
    return make_sequence(None, [1] * tokens, now=at, **fields)


def in_order(
    queue: list[SequenceState],
    now: float,
    cost: StepCost | None = COST,
    *,
    chunk: int = 512,
    beside: Sequence[Work] = (),
) -> list[int]:
    """The places that the prompts had before they were sorted."""
    found = list(queue)
    order: PromptOrder = SlackOrder(lambda: cost)
    order.sort(found, chunk, beside, now)
    return [queue.index(seq) for seq in found]


def test_who_is_due_first_goes_first() -> None:
    queue = [prompt(first_token_in=5.0), prompt(first_token_in=1.0), prompt(first_token_in=3.0)]
    assert in_order(queue, 0.0) == [1, 2, 0]
    assert in_order(queue, 0.0, cost=None) == [1, 2, 0]


def test_importance_goes_before_urgency() -> None:
    queue = [prompt(first_token_in=1.0, priority=1), prompt(first_token_in=9.0), prompt(priority=-1)]
    assert in_order(queue, 0.0) == [2, 1, 0]


def test_a_prompt_that_comes_while_a_step_is_planned_keeps_its_class() -> None:
    """The step's time was read a moment before. Such a prompt stood behind the next class, for that step."""
    now = 7.0
    queue = [prompt(at=now - 1.0, priority=1, first_token_in=1.0), prompt(at=now + 1e-6, first_token_in=1.0)]
    assert in_order(queue, now) == [1, 0]
    assert level_of(queue[1], now) == level_of(queue[1], now + 1.0) == 0.0


def test_what_cannot_be_in_time_any_more_waits_for_what_can() -> None:
    long, short = prompt(tokens=2000, first_token_in=1.0), prompt(first_token_in=4.0)
    assert in_order([long, short], 0.0) == [1, 0], "2000 tokens take more than a second"
    assert in_order([long, short], 0.0, cost=None) == [0, 1]
    assert in_order([long, short], 1.5, cost=None) == [1, 0], "without a model, what is late is late"


def test_small_chunks_beside_others_take_longer() -> None:
    """400 tokens: under half a second alone, and 40 steps of 20 ms and more beside ten others."""
    long, short = prompt(tokens=400, first_token_in=1.0), prompt(first_token_in=2.0)
    rows = [Work(prompt(tokens=1000), 1, PrefillScheduler(make_kv(9, 4))) for _ in range(10)]
    assert in_order([long, short], 0.0) == [0, 1]
    assert in_order([long, short], 0.0, chunk=10, beside=rows[:1]) == [0, 1]
    assert in_order([long, short], 0.0, chunk=10, beside=rows) == [1, 0]
    context = StepCost(fixed=0.01, token=0.0001, context=1e-6, samples=9)
    assert in_order([long, short], 0.0, context, chunk=10, beside=rows) == [0, 1]
    rows[0].seq.tokens += [0] * 9000
    assert in_order([long, short], 0.0, context, chunk=10, beside=rows) == [1, 0], "their KV is read in each step"


def test_a_prompt_without_objectives_has_its_turn_among_others() -> None:
    plain, due = prompt(at=0.0), prompt(at=1.0, first_token_in=1.0)
    assert in_order([plain, due], 1.0) == [1, 0]
    later = prompt(at=UNHURRIED + 1.0, first_token_in=1.0)
    assert in_order([plain, later], UNHURRIED + 1.0) == [0, 1]


def test_as_many_as_can_be_are_in_time() -> None:
    """The longest is left out, whoever is due first; and nobody while all can be in time."""
    long, short = prompt(tokens=1500, first_token_in=2.0), [prompt(tokens=300, first_token_in=2.1) for _ in range(3)]
    assert in_order([long, *short], 0.0) == [1, 2, 3, 0]
    for seq in short:
        seq.objectives.due = 2.6
    assert in_order([long, *short], 0.0) == [0, 1, 2, 3]
    long.computed = 1200
    for seq in short:
        seq.objectives.due = 1.4
    assert in_order([long, *short], 0.0) == [1, 2, 3, 0], "what is left of it is short, but due later"
    long.objectives.due = 1.0
    assert in_order([long, *short], 0.0) == [0, 1, 2, 3]


def test_those_left_out_keep_their_order_and_their_class() -> None:
    """They go before what is less important, which waits for them."""
    first, second = (prompt(tokens=900, first_token_in=due) for due in (0.1, 0.2))
    fine = prompt(tokens=900, first_token_in=2.0)
    less = prompt(first_token_in=1.0, priority=1)
    assert in_order([second, less, first, fine], 0.0) == [3, 2, 0, 1]
    seconds, levels = dict.fromkeys((first, second, fine, less), 0.9), {first: 0, second: 0, fine: 0, less: 1}
    assert left_out([first, second, fine, less], seconds, levels, 0.0) == {first, second, less}


def test_a_prompt_without_objectives_is_left_out_for_nobody() -> None:
    """It takes its turn and its time, and misses nothing."""
    plain, due = prompt(tokens=5000, at=-UNHURRIED), prompt(first_token_in=1.0)
    assert in_order([due, plain], 0.0) == [1, 0]
    queue = [plain, due]
    assert left_out(queue, {plain: 5.0, due: 0.1}, dict.fromkeys(queue, 0), 0.0) == {due}


def test_one_that_is_late_anyhow_takes_nobody_with_it() -> None:
    """It waits for what has no objective: leaving out the others would not help it."""
    good = [prompt(first_token_in=due) for due in (2.0, 3.0)]
    plain = prompt(at=-UNHURRIED + 4.0)
    hopeless = [prompt(first_token_in=due) for due in (5.0, 5.1)]
    queue = [*good, plain, *hopeless]
    seconds = dict(zip(queue, (1.0, 1.0, 50.0, 0.5, 0.5), strict=True))
    assert left_out(queue, seconds, dict.fromkeys(queue, 0), 0.0) == set(hopeless)


@settings(max_examples=300, deadline=None)
@given(prompts=st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(-1.0, 6.0), st.booleans()), max_size=8))
def test_beside_prompts_without_objectives(prompts: list[tuple[float, float, bool]]) -> None:
    """Those that are kept are in time, and one prompt more leaves no fewer in time."""
    queue = [prompt(first_token_in=due) if hurried else prompt(at=due - UNHURRIED) for _, due, hurried in prompts]
    seconds = {seq: each[0] for seq, each in zip(queue, prompts, strict=True)}
    queue.sort(key=due_of)
    late = left_out(queue, seconds, dict.fromkeys(queue, 0.0), 0.0)
    hurried = [seq for seq in queue if seq.objectives.due < inf]
    assert late <= set(hurried) and in_time([seq for seq in queue if seq not in late], seconds, 0.0)
    for place, seq in enumerate(queue):
        if seq.objectives.due < inf:
            before = [other for other in queue[:place] if other.objectives.due < inf]
            known = left_out(queue[: place + 1], seconds, dict.fromkeys(queue, 0.0), 0.0)
            earlier = left_out(queue[:place], seconds, dict.fromkeys(queue, 0.0), 0.0)
            assert len(before) - len(earlier) <= len(before) + 1 - len(known)


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.floats(0.01, 3.0), st.floats(-1.0, 6.0), st.integers(0, 1)), max_size=7),
)
def test_no_choice_leaves_out_fewer(prompts: list[tuple[float, float, int]]) -> None:
    """Of every level as many are in time as of any of its subsets, behind all that is more important."""
    queue = [prompt(first_token_in=due, priority=level) for _, due, level in prompts]
    seconds = {seq: each[0] for seq, each in zip(queue, prompts, strict=True)}
    levels = {seq: float(seq.objectives.priority) for seq in queue}
    queue.sort(key=lambda seq: (levels[seq], seq.objectives.due))
    late, begin = left_out(queue, seconds, levels, 0.0), 0.0
    for level in (0.0, 1.0):
        mine = [seq for seq in queue if levels[seq] == level]
        kept = [seq for seq in mine if seq not in late]
        assert in_time(kept, seconds, begin)
        more = combinations(mine, len(kept) + 1)
        assert not any(in_time(found, seconds, begin + 2e-9) for found in more)
        begin += sum(seconds[seq] for seq in mine)


def in_time(queue: Sequence[SequenceState], seconds: dict[SequenceState, float], begin: float) -> bool:
    """True if all are, one after the other."""
    for seq in queue:
        begin += seconds[seq]
        if begin > seq.objectives.due + 1e-9:
            return False
    return True


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), now=st.floats(0.0, 1e4), priority=st.integers(-3, 3))
def test_without_objectives_it_is_first_come_first_served(seed: int, now: float, priority: int) -> None:
    choice = random.Random(seed)
    queue = [prompt(choice.randrange(1, 99), at=choice.uniform(0.0, 100.0)) for _ in range(choice.randrange(9))]
    assert in_order(queue, now) == list(range(len(queue))), "in the order they were queued, whenever they arrived"
    arrivals = sorted(choice.uniform(0.0, 100.0) for _ in range(5))
    same = [prompt(choice.randrange(1, 99), at=at, priority=priority) for at in arrivals]
    assert in_order(same, now) == list(range(5))


@pytest.mark.parametrize("objective", [5.0, 60.0])
def test_a_prompt_is_not_raised_while_it_has_time(objective: float) -> None:
    """It has waited long only by what its own objective says."""
    patient, urgent = prompt(priority=STEP, first_token_in=objective), prompt(first_token_in=1.0)
    first = max(AGE, objective)
    for now, level in ((first - 1.0, STEP), (first + 0.01, 0), (first + AGE + 0.01, -STEP)):
        assert level_of(patient, now) == level
        urgent.prefill.waiting_since, urgent.objectives.due = now, now + 1.0
        assert in_order([patient, urgent], now)[0] == int(level > 0 or (level == 0 and now > objective))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nobody_is_passed_by_those_who_come_much_later(seed: int) -> None:
    """The bound: one of priority p is before all of priority q that came ((p − q) / STEP + 1) · AGE later.

    What its objective has beyond AGE comes on top.
    """
    choice = random.Random(seed)
    queue = []
    for _ in range(choice.randrange(2, 12)):
        fields: dict[str, Any] = {
            "priority": choice.randrange(-2 * STEP, 2 * STEP + 1),
            "at": choice.uniform(0.0, 9 * AGE),
        }
        if choice.random() < 0.7:
            fields["first_token_in"] = choice.uniform(-5.0, 60.0)
        queue.append(prompt(choice.randrange(1, 3000), **fields))
    queue.sort(key=lambda seq: seq.prefill.waiting_since)
    now = queue[-1].prefill.waiting_since + choice.choice((0.0, choice.uniform(0.0, 99.0)))
    order = in_order(queue, now)
    for place, i in enumerate(order):
        for j in order[:place]:
            levels = (queue[i].objectives.priority - queue[j].objectives.priority) / STEP + 1
            later = queue[j].prefill.waiting_since - queue[i].prefill.waiting_since
            patience = queue[i].objectives.due - queue[i].prefill.waiting_since
            given = max(0.0, patience - AGE) if patience < inf else 0.0
            assert later < levels * AGE + given + 1e-6


def test_a_class_is_a_step_from_the_next() -> None:
    classes = sorted(known.priority for known in SERVICE_CLASSES.values())
    assert [after - before for before, after in pairwise(classes)] == [STEP] * (len(classes) - 1)


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_is_served_in_the_end_however_many_urgent_ones_come(late: bool) -> None:
    """One urgent prompt a step, which is all a step computes: the one that is not important waits 3 · AGE at most."""
    kv = make_kv(64, 4)
    scheduler = PrefillScheduler(kv, order=SlackOrder(lambda: COST))
    patient = make_sequence(kv, [7] * 4, priority=2 * STEP, **({"first_token_in": 0.5} if late else {}))
    scheduler.add(patient)
    now = 0.0
    while not patient.computed:
        now += 1.0
        urgent = make_sequence(kv, [1, int(now) % 50, 2], now=now, first_token_in=1.0)
        scheduler.add(urgent)
        plan = StepPlan(4, 1)
        scheduler.fill(plan, now)
        (work,) = plan.work
        work.seq.computed += work.count
        scheduler.remove(work.seq)
        kv.release(work.seq)
        if work.seq is patient:
            break
        assert now <= 3 * AGE, "it starves"
    assert now >= 2 * AGE, "importance counts for nothing"


def test_a_prompt_in_progress_keeps_its_blocks_when_it_is_passed() -> None:
    kv = make_kv(6, 4)
    scheduler = PrefillScheduler(kv, order=SlackOrder(lambda: COST))
    long = make_sequence(kv, range(12), first_token_in=50.0)
    scheduler.add(long)
    plan = StepPlan(4, 9)
    scheduler.fill(plan, 0.0)
    long.computed += 4
    held = list(long.blocks)
    urgent = make_sequence(kv, [7] * 3, first_token_in=1.0)
    too_much = make_sequence(kv, [8] * 12, first_token_in=2.0)
    scheduler.add(urgent)
    scheduler.add(too_much)
    plan = StepPlan(5, 9)
    scheduler.fill(plan, 0.0)
    assert [(work.seq, work.count) for work in plan.work] == [(urgent, 3), (long, 2)]
    assert long.blocks == held and not too_much.blocks
    assert scheduler.wanted_blocks() == kv.least_blocks(too_much)


def test_the_due_time_of_nothing_is_never() -> None:
    assert prompt().objectives.due == inf
