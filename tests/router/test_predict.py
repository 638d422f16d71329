"""What a placement is predicted to bring: the arithmetic behind the goodput policy."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill import ordering
from router.arrivals import Arrivals
from router.calibration import Drift
from router.candidate import AGE, STEP, UNHURRIED, Candidate, QueuedPrompt
from router.chances import within
from router.predict import LATE_SHARE, _level, after_backlog, backlog_seconds, others_lost
from router.prompt_steps import PromptSteps, prompt_steps
from serving.engine import ageing
from serving.messages import Role
from serving.step_cost import StepCost, StepLoad, pairs
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_kv
from tests.router.costed import COST, choose, place_of, queue_seconds, queued_lost, wanting, worker


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 600))
def test_a_prompts_seconds_are_the_sum_of_its_steps(start: int, count: int, chunk: int) -> None:
    total, at = 0.0, start
    while at < start + count:
        size = min(chunk, start + count - at)
        total += COST.seconds(StepLoad.of(at, size))
        at += size
    predicted = COST.prompt_seconds(start, start + count, chunk)
    assert predicted == pytest.approx(total, rel=0.02 + COST.context * chunk / COST.fixed)


@given(st.floats(0, 1), st.integers(0, 4000), st.integers(0, 60), st.integers(1, 2000))
def test_a_chunk_is_the_most_that_fits(seconds: float, start: int, rows: int, most: int) -> None:
    beside = StepLoad(rows, rows * 300.0, rows, rows * 300.0)
    chunk = COST.chunk_within(seconds, start, beside, most)
    assert 0 <= chunk <= most
    if chunk:
        assert COST.seconds(beside + StepLoad.of(start, chunk)) <= seconds * (1 + 1e-9)
    if chunk < most:
        assert COST.seconds(beside + StepLoad.of(start, chunk + 1)) > seconds * (1 - 1e-9) - 2 * COST.token


@given(st.floats(0.0, 1e-15), st.floats(1e-9, 1e-2), st.floats(1e-4, 1.0))
def test_a_chunk_hardly_depends_on_pairs_that_cost_next_to_nothing(pair: float, token: float, seconds: float) -> None:
    cost, plain = (StepCost(fixed=1e-5, token=token, pair=each) for each in (pair, 0.0))
    chunks = [each.chunk_within(seconds, 0, StepLoad(), 512) for each in (cost, plain)]
    assert chunks[0] == pytest.approx(chunks[1], abs=1, rel=0.01)


@given(st.integers(0, 500), st.integers(0, 500))
def test_pairs_are_counted_one_by_one(start: int, count: int) -> None:
    assert pairs(start, count) == sum(start + i for i in range(1, count + 1))


def prompt_seconds(there: Candidate, tokens: int, tpot: float | None) -> float:
    return PromptSteps(there, COST, tpot).prompt_seconds(0, tokens)


def test_chances_are_even_at_the_limit_and_grow_with_it() -> None:
    assert within(1.0, 1.0, 0.3) == pytest.approx(0.5)
    assert within(2.0, 1.0, 0.3) > 0.95 > within(1.2, 1.0, 0.3) > 0.5
    assert within(0.0, 1.0, 0.3) == within(-1.0, 1.0, 0.3) == 0.0
    assert within(1.0, 0.0, 0.3) == 1.0


@given(st.integers(0, 40), st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.sampled_from(Role))
def test_no_more_are_lost_than_run(rows: int, before: float, added: float, role: Role) -> None:
    there = worker("w", role, rows=rows)
    assert 0.0 <= others_lost(there, prompt_steps(there, COST, None), before, before + added) <= rows


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_what_makes_steps_too_long_breaks_those_that_decode_there(role: Role) -> None:
    """Objectives are 100 ms. A step that is too long by itself is a risk, a little more of a short one is none."""
    there = worker("w", role, rows=10)
    assert others_lost(there, prompt_steps(there, COST, None), 0.02, 0.021) == pytest.approx(0.0, abs=1e-4)
    assert others_lost(there, prompt_steps(there, COST, None), 0.02, 0.3) > 5.0


def test_prompts_go_slower_beside_decodes_whose_objectives_are_tight() -> None:
    idle, busy = worker("i"), worker("b", rows=20)
    assert prompt_seconds(idle, 1000, None) < prompt_seconds(busy, 1000, None)
    assert prompt_seconds(busy, 1000, None) < prompt_seconds(busy, 1000, 0.03)
    assert prompt_seconds(idle, 1000, 0.03) == prompt_seconds(idle, 1000, None)


@given(st.floats(1e-3, 0.1), st.floats(1e-3, 0.5), st.floats(0.0, 20.0), st.integers(1, 300))
def test_a_backlog_slows_as_many_tokens_as_it_takes(token: float, pause: float, backlog: float, count: int) -> None:
    """Token by token: one takes `pause` as far as the backlog lasts, and `token` from then on."""
    left, total = backlog, 0.0
    for _ in range(count):
        share = min(1.0, left / pause) if pause > token else 0.0
        left -= share * pause
        total += share * pause + (1.0 - share) * token
    assert after_backlog(token, pause, backlog, count) == pytest.approx(total / count)


def test_who_passes_a_long_prompt_decodes_beside_it() -> None:
    """It was due sooner and is computed first, but the text it passes goes on with it: its tokens are later."""
    idle = worker("i")
    busy = worker("b", waiting_seconds=2.0, waiting_tokens=4000, queued=[QueuedPrompt(0, 9.0, 2.0)])
    alone, beside = (choose(wanting(), each).predicted for each in (idle, busy))
    assert alone is not None and beside is not None and beside.queue == 0.0
    assert beside.token > 1.5 * alone.token
    last = choose(wanting(ttft=20.0), busy).predicted
    assert last is not None and last.queue == pytest.approx(2.0), "it waits for the long one"
    assert last.token == pytest.approx(alone.token), "and then decodes alone"


@pytest.mark.parametrize("rows", [1, 20, 40])
def test_a_prompt_beside_decodes_goes_in_steps_as_long_as_workers_make_them(rows: int) -> None:
    """Not of one TPOT: they go up to three where decodes are early, as prefill.chunking does."""
    busy = worker("b", rows=rows)
    assert busy.tightest_tpot is not None
    at, seconds = 0, 0.0
    while at < 2000:
        fits = COST.chunk_within(COST.pause_seconds(busy.tightest_tpot), at, busy.decode_load, 512 - rows)
        chunk = StepLoad.of(at, min(fits, 2000 - at))
        seconds += COST.seconds(busy.decode_load + chunk)
        at += chunk.new_tokens
    assert prompt_seconds(busy, 2000, None) == pytest.approx(seconds, rel=0.05)


def test_what_will_be_late_in_any_case_is_passed() -> None:
    """Workers compute it last (prefill.ordering), be it due already or not."""
    for due in (-1.0, 0.5):
        late = worker("l", waiting_seconds=1.0, queued=[QueuedPrompt(0, due, 1.0)])
        for other in (0.6, 5.0):
            assert queue_seconds(QueuedPrompt(0, other, 0.1), late) == 0.0
    hopeful = worker("h", waiting_seconds=1.0, queued=[QueuedPrompt(0, 1.5, 1.0)])
    assert queue_seconds(QueuedPrompt(0, 5.0, 0.1), hopeful) == pytest.approx(1.0)


@pytest.mark.parametrize("now", [0.0, 0.5, 0.9, 5.0])
def test_a_queue_is_no_shorter_the_older_the_heartbeat(now: float) -> None:
    """What was reported to wait counts down, as if nothing slowed it down; who has no first token waits."""
    there = worker("w", waiting_seconds=1.0, queued=[QueuedPrompt(0, 9.0, 0.4), QueuedPrompt(0, 20.0, 0.6)])
    assert queue_seconds(QueuedPrompt(0, 10.0, 0.1), there, now) == pytest.approx(0.4)
    assert queue_seconds(QueuedPrompt(0, 30.0, 0.1), there, now) == pytest.approx(1.0)


def test_what_other_routers_have_sent_is_spread_as_our_own() -> None:
    there = worker("w", waiting_seconds=3.0, queued=[QueuedPrompt(0, 9.0, 0.5), QueuedPrompt(0, 30.0, 1.5)])
    assert queue_seconds(QueuedPrompt(0, 20.0, 0.0), there) == pytest.approx(0.5 + 1.0 / 4)
    late = worker("l", waiting_seconds=9.0, queued=[QueuedPrompt(0, 0.1, 1.0)] * 8)
    assert queue_seconds(QueuedPrompt(0, 20.0, 0.0), late) == 0.0, "theirs are late as well"
    half = worker("h", waiting_seconds=20.0, queued=[QueuedPrompt(0, 1.0, 5.0), QueuedPrompt(0, 15.0, 5.0)])
    assert queue_seconds(QueuedPrompt(0, 20.0, 0.0), half) == pytest.approx(10.0), "late ones count once"


@given(st.integers(0, 40), st.floats(0.01, 2.0))
def test_the_fewer_of_a_queue_a_router_has_sent_the_more_of_it_goes_first(own: int, seconds: float) -> None:
    """Before, one prompt that is due later spoke for twenty seconds of others': a router that had just begun to send
    took the worker for empty.
    """
    prompt = QueuedPrompt(0, 20.0, seconds)
    for due, goes_first in ((30.0, 0.0), (10.0, 1.0), (0.1, 0.0)):
        queues = [[QueuedPrompt(0, due, 0.5)] * sent for sent in (own, own + 1)]
        there, more = (worker("w", waiting_seconds=20.0, waiting=99, queued=queue) for queue in queues)
        waits, further = (queue_seconds(prompt, each) for each in (there, more))
        if own == 0:
            assert waits == pytest.approx(20.0), "of nobody's it is known that it can be passed"
        if goes_first:
            assert waits == pytest.approx(max(20.0, own * 0.5))
        else:
            assert waits == pytest.approx(max(0.0, 20.0 - own * 0.5) * seconds / (seconds + own * 0.5))
            assert further < waits or waits == 0.0


def test_what_takes_longer_than_predicted_is_nobody_elses() -> None:
    """As many wait as the router has sent: it knows which of them go first."""
    queue = [QueuedPrompt(0, due, 0.5, at=-1.0) for due in (10.0, 30.0, 30.0, 30.0)]
    prompt = QueuedPrompt(0, 20.0, 5.0)
    all_ours, others_too = (worker("w", waiting_seconds=8.0, waiting=count, queued=queue) for count in (4, 5))
    assert queue_seconds(prompt, all_ours) == pytest.approx(2.0)
    assert queue_seconds(prompt, others_too) > 5.0
    newer = worker("w", waiting_seconds=8.0, waiting=4, queued=[prompt._replace(at=1.0) for prompt in queue])
    assert newer.strangers, "sent since: what waited when the worker said so is others'"


def test_prompts_without_objectives_are_never_late() -> None:
    """Workers leave them out for nobody, and compute the oldest first."""
    plain = [QueuedPrompt(0, inf, 1.0, at=float(at)) for at in range(20)]
    there = worker("w", waiting_seconds=20.0, queued=plain)
    for now in (20.0, 25.0):
        assert queue_seconds(QueuedPrompt(0, inf, 0.1), there, now) == pytest.approx(20.0)
        first = int(now + 3.0 - UNHURRIED) + 1  # those that are treated as due sooner
        assert queue_seconds(QueuedPrompt(0, now + 3.0, 0.1), there, now) == pytest.approx(first)


def test_late_prompts_that_are_more_important_are_not_passed() -> None:
    """By their class, or raised by a class as they have waited: workers leave prompts out for others of their level."""
    prompt, now = QueuedPrompt(0, 61.0, 0.1), 60.0
    for other, waits in (
        (QueuedPrompt(-1, 1.0, 5.0, at=59.0), 5.0),
        (QueuedPrompt(0, 1.0, 5.0, at=30.0), 5.0),
        (QueuedPrompt(STEP, 1.0, 5.0, at=0.0), 5.0),
        (QueuedPrompt(STEP, 1.0, 5.0, at=30.0), 0.0),
        (QueuedPrompt(0, 1.0, 5.0, at=30.1), 0.0),
        (QueuedPrompt(1, 90.0, 5.0, at=59.0), 0.0),
    ):
        there = worker("w", waiting_seconds=5.0, queued=[other])
        assert queue_seconds(prompt, there, now) == pytest.approx(waits), other
        assert backlog_seconds(there, COST, 0.0) == 5.0, "what decodes goes on beside all of it"


def test_those_that_are_late_anyhow_are_not_lost_to_a_prompt_that_passes_them() -> None:
    drift, prompt = Drift(), QueuedPrompt(0, 1.0, 0.9)
    late = worker("l", waiting_seconds=1.0, queued=[QueuedPrompt(0, 1.1, 1.5)])
    hopeful = worker("h", waiting_seconds=1.0, queued=[QueuedPrompt(0, 1.6, 1.5)])
    assert queued_lost(prompt, late, drift) == 0.0
    assert queued_lost(prompt, hopeful, drift) > 0.3


ARRIVALS = st.builds(
    Arrivals, st.integers(-1, 1), st.floats(1e-3, 60.0), st.floats(0.0, 10.0), st.floats(0.0, 50.0)
)  # fmt: skip


@given(st.lists(ARRIVALS, max_size=3), st.floats(0, 20), st.floats(0, 5), st.floats(-9.0, 60.0), st.floats(0, 1))
def test_no_more_newcomers_are_lost_than_come_until_a_prompt_is_computed(
    kinds: list[Arrivals], queue: float, compute: float, due: float, chance: float
) -> None:
    there, prompt = replace(worker("w"), arrivals=tuple(kinds)), QueuedPrompt(0, due, compute)
    lost = place_of(prompt, there).newcomers_lost(compute, queue, chance)
    assert -1e-9 <= lost <= sum(kind.rate for kind in kinds) * (queue + compute) * (1 + 1e-9)


def lost_to(kind: Arrivals, prompt: QueuedPrompt, queue: float = 0.0, chance: float = 1.0) -> float:
    place = place_of(prompt, replace(worker("w"), arrivals=(kind,)), drift=Drift(variance=0.01))
    return place.newcomers_lost(prompt.seconds, queue, chance)


def test_newcomers_that_pass_a_prompt_lose_nothing_to_it() -> None:
    """Ten a second that are due within a second; the prompt takes two and has six."""
    urgent = Arrivals(0, 1.0, 0.2, 10.0)
    assert lost_to(urgent, QueuedPrompt(0, 6.0, 2.0)) < 0.01
    assert lost_to(urgent._replace(priority=-1), QueuedPrompt(0, 2.5, 2.0)) < 0.2, "more important ones pass any"
    assert lost_to(urgent, QueuedPrompt(-1, 6.0, 2.0)) > 10.0, "but none that is more important"


def test_newcomers_that_are_due_later_wait_behind_it_and_may_be_late() -> None:
    alike = Arrivals(0, 3.0, 2.0, 1.0)
    assert lost_to(alike, QueuedPrompt(0, 3.0, 2.0)) == pytest.approx(2.0, rel=0.05), "two seconds' worth"
    assert lost_to(alike._replace(seconds=0.1), QueuedPrompt(0, 3.0, 2.0)) < 0.1, "short ones are in time even so"
    assert lost_to(alike, QueuedPrompt(0, 30.0, 2.0), 20.0) < 0.01, "and who is late anyhow loses nothing"


def test_newcomers_that_come_while_it_waits_stand_behind_it_too() -> None:
    """Ten a second, each in time after a second of queue and late after two: from the first of that queue on."""
    alike = Arrivals(0, 2.0, 0.2, 10.0)
    assert lost_to(alike, QueuedPrompt(0, 2.0, 1.4), 0.0) == pytest.approx(0.0, abs=0.5), "nobody waits before it"
    assert lost_to(alike, QueuedPrompt(0, 2.0, 1.4), 1.0) == pytest.approx(24.0, rel=0.05)
    assert lost_to(alike, QueuedPrompt(0, 3.0, 1.4), 1.0) == pytest.approx(14.0, rel=0.05), "who is due sooner passes"


def test_a_prompt_that_is_late_costs_newcomers_a_part_of_its_time() -> None:
    alike, prompt = Arrivals(0, 3.0, 2.0, 1.0), QueuedPrompt(0, 0.1, 2.0)
    assert lost_to(alike, prompt, chance=0.0) == pytest.approx(2.0 * LATE_SHARE, rel=0.05)
    less = alike._replace(priority=1)
    assert lost_to(less, prompt, chance=0.0) == pytest.approx(2.0, rel=0.05), "but those less important wait all of it"


def test_what_can_be_in_time_nowhere_goes_where_nobody_else_would_be() -> None:
    """Both workers are full of prompts; from one of them first tokens come in time, from the other none."""
    kinds = {"u": (Arrivals(0, 0.3, 0.25, 8.0),), "l": ()}
    useful, lost = (
        replace(worker(name, waiting_seconds=2.0, waiting_tokens=4000), arrivals=arrivals)
        for name, arrivals in kinds.items()
    )
    assert choose(wanting(tokens=512, ttft=0.3), useful, lost).prefill is lost


def test_a_long_prompt_goes_to_a_worker_that_is_idle_between_urgent_ones() -> None:
    """Those pass it; kept away from them it waited behind a queue of its like until it was late."""
    idle = replace(worker("i"), arrivals=(Arrivals(0, 1.0, 0.2, 2.0),))
    full = worker("f", waiting_seconds=5.0, waiting_tokens=10_000, queued=[QueuedPrompt(0, 6.0, 5.0)])
    assert choose(wanting(tokens=3000, ttft=6.0), idle, full).prefill is idle


def test_prompts_hold_back_no_token_beyond_its_objective_in_the_mean() -> None:
    """However many tokens a step brings: its slack is theirs."""
    held = PromptSteps(worker("w"), COST, 0.05).held_seconds
    assert held(0.01) <= 0.05 and held(0.08) == 0.08
    assert PromptSteps(worker("w"), COST, None).held_seconds(0.01) == math.inf


@given(st.integers(0, 60), st.integers(0, 60), st.floats(0, 1))
def test_leases_that_wait_for_prompts_count_by_the_share_that_decodes(running: int, waiting: int, share: float) -> None:
    there = replace(worker("w", running=running, leases=running + waiting), decoding=share)
    assert there.decode_load.sequences == running + round(share * waiting)
    assert replace(there, decoding=1.0).decode_load.sequences == there.held_leases


def test_workers_order_prompts_by_the_same_constants() -> None:
    assert (AGE, STEP, UNHURRIED) == (ageing.AGE, ageing.STEP, ordering.UNHURRIED)


@given(
    priority=st.sampled_from((-STEP, 0, STEP)),
    objective=st.floats(0.1, 200.0) | st.just(math.inf),
    waited=st.floats(0.0, 400.0),
)
def test_a_prompt_is_raised_when_its_worker_raises_it(priority: int, objective: float, waited: float) -> None:
    sequence = make_sequence(make_kv(4, 4), [1], priority=priority)
    sequence.prefill.waiting_since, sequence.objectives.due = 100.0, 100.0 + objective
    queued = QueuedPrompt(priority, 100.0 + objective, 0.1, 100.0)
    assert _level(queued, 100.0 + waited) == ageing.level_of(sequence, 100.0 + waited)
