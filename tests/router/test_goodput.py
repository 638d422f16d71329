"""The goodput policy: what it predicts, and what it chooses by that."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.calibration import Calibration, urgency_of
from router.candidate import Dispatched, QueuedPrompt
from router.goodput import Goodput
from router.predict import KnownCosts, Prediction, backlog_seconds
from serving.messages import TPOT_BINS_MS, Role, Slo
from serving.step_cost import StepCost, StepLoad
from tests.router.conftest import World, expected, wanted
from tests.router.costed import COST, choose, queue_seconds, queued_lost, wanting, worker
from tests.router.plain_choice import objectives_used
from tests.router.scripted import lease_view

# ---- choices -------------------------------------------------------------------------------------------------------


def test_a_request_goes_where_it_meets_its_objectives() -> None:
    """The queue of one would cost the TTFT, the batch of the other the TPOT of a tight request but not of a loose."""
    queued = worker("queued", waiting_seconds=3.0, waiting_tokens=6000)
    decoding = worker("decoding", rows=50)
    assert choose(wanting(tpot_ms=100.0), queued, decoding).decode is decoding
    assert choose(wanting(ttft=8.0, tpot_ms=15.0), queued, decoding).decode is queued


def test_prompts_beside_it_are_held_back_by_its_own_objective() -> None:
    """A worker of texts without objectives computes long steps of prompts: it will not once this request is there."""
    nobodys = (0,) * (len(TPOT_BINS_MS) + 1)
    batches = worker("batches", rows=10, prompt_share=0.9, tpot_counts=nobodys)
    demand = wanting(tokens=512, tpot_ms=60.0)
    predicted = choose(demand, batches).predicted
    assert predicted is not None and predicted.token <= 0.06
    behind = worker("behind", rows=4, waiting_seconds=0.8, waiting_tokens=1600)
    assert choose(demand, batches, behind).decode is batches
    loose = choose(wanting(tokens=512, tpot_ms=None), batches).predicted
    assert loose is not None and loose.token > 0.06


def test_it_does_not_break_what_runs() -> None:
    """One more row would cost many others their objective: the request goes where it is slower itself."""
    counts = [0] * 16
    counts[TPOT_BINS_MS.index(56.0)] = 40
    tight = worker("tight", Role.DECODE, rows=40, tpot_counts=tuple(counts))
    spare = worker("spare", Role.DECODE, rows=45)
    prefill = worker("p", Role.PREFILL)
    assert choose(wanting(), prefill, tight, spare).decode is spare


def test_a_shorter_queue_is_worth_more_than_fewer_rows_whose_pace_prompts_have_varied() -> None:
    """Steps of either take a tenth of the objective, so nobody there will miss it because of one more row."""
    policy = Goodput()
    for observed in (0.02, 0.2) * 100:
        policy.calibration.further_tokens("other-1", 0.06, observed, both=True)
    assert policy.calibration.further("other-1", both=True).error > 1.0
    few = worker("few", rows=2, waiting_seconds=0.4, waiting_tokens=800)
    many = worker("many", rows=8)
    assert choose(wanting(), few, many, policy=policy).prefill is many


def test_mixed_or_split_is_decided_by_what_each_would_bring() -> None:
    """A long prompt beside many decodes is better computed elsewhere; a short one on an idle mixed worker stays."""
    prefill, decode = worker("p", Role.PREFILL), worker("d", Role.DECODE, rows=4)
    busy = worker("m", rows=30, prompt_share=0.6)
    chosen = choose(wanting(tokens=3000, ttft=4.0, tpot_ms=40.0), prefill, decode, busy)
    assert (chosen.prefill, chosen.decode) == (prefill, decode)
    idle = worker("m")
    loaded = worker("p", Role.PREFILL, waiting_seconds=2.0)
    chosen = choose(wanting(), loaded, decode, idle)
    assert chosen.prefill is chosen.decode is idle


def test_cached_tokens_are_worth_the_prefill_they_save_and_no_more() -> None:
    holder, idle = worker("h", waiting_seconds=0.2), worker("i")
    demand = wanting(tokens=2000, ttft=5.0, cached={"h-life": 1900})
    assert choose(demand, holder, idle).prefill is holder
    swamped = worker("h", waiting_seconds=3.0)
    assert choose(demand, swamped, idle).prefill is idle


def test_one_prefix_that_everybody_asks_for_is_computed_at_all_workers_before_queues_grow() -> None:
    holder, idle = worker("h", waiting_seconds=1.5), worker("i")
    demand = wanting(tokens=2000, ttft=5.0, cached={"h-life": 1900})
    assert COST.prompt_seconds(0, 2000, 512) < 1.5, "the other one is earlier, and has it from then on"
    assert choose(demand, holder, idle).prefill is idle


def test_what_was_sent_since_the_heartbeat_counts() -> None:
    sent = worker("a", newer=Dispatched(leases=3, context_tokens=900, prompt_tokens=3000, prompt_seconds=1.5))
    assert choose(wanting(), sent, worker("b")).prefill is not sent


def test_a_queue_gets_shorter_as_time_passes() -> None:
    decision = choose(wanting(), worker("a", waiting_seconds=1.0), now=0.75)
    assert decision.predicted is not None and decision.predicted.queue == pytest.approx(0.25)


def test_near_ties_are_spread_over_requests() -> None:
    workers = [worker(name) for name in "abcd"]
    chosen = [choose(wanting(salt=crc32(b"%d" % n)), *workers).decode for n in range(200)]
    assert min(chosen.count(each) for each in workers) >= 20


def test_a_single_token_needs_a_prefill_worker_only() -> None:
    free, queued = worker("f", Role.PREFILL), worker("q", Role.PREFILL, waiting_seconds=1.0)
    demand = wanting(output=1)
    decision = Goodput().choose(demand, lease_view(demand, [free, queued]), 0.0)
    assert decision is not None and decision.decode is None and decision.prefill is free


def test_without_any_costs_it_ranks_as_prefix_aware_does() -> None:
    blind = [worker(name, step_cost=None) for name in "ab"]
    assert choose(wanting(), *blind).reason == "prefix_aware"


def test_a_worker_without_costs_is_taken_for_one_like_the_others() -> None:
    """It neither turns prediction off for all, nor draws the requests that others have too much to do for."""
    busy, blind = worker("busy", rows=50, waiting_seconds=2.0), worker("blind", step_cost=None)
    chosen = choose(wanting(), busy, blind)
    assert chosen.reason != "prefix_aware" and chosen.decode is blind and chosen.predicted is not None
    swamped = worker("blind", step_cost=None, waiting_tokens=40_000, rows=50)
    assert choose(wanting(), worker("idle"), swamped).decode is not swamped
    assert all(placed.predicted is not None for placed in choose(wanting(), worker("idle"), swamped).considered)


@given(st.lists(st.tuples(st.sampled_from(list(Role)), st.floats(0.5, 2.0), st.booleans()), min_size=1, max_size=12))
def test_every_worker_has_a_cost_once_one_has(fleet: list[tuple[Role, float, bool]]) -> None:
    """Its own where it reports one, and else one within what its role's, or all, report."""

    def own(factor: float) -> StepCost:
        return StepCost(fixed=COST.fixed * factor, token=COST.token * factor, samples=9)

    workers = [
        worker(f"w{n}", role, step_cost=own(factor) if sees else None) for n, (role, factor, sees) in enumerate(fleet)
    ]
    costs, seen = KnownCosts(workers), [each for each in workers if each.cost is not None]
    assert costs.known is bool(seen)
    for each in workers if seen else ():
        alike = [other for other in seen if other.status.role == each.status.role] or seen
        known = sorted(other.cost.token for other in alike if other.cost is not None)
        found = costs.of(each)
        assert (found is each.cost) if each.cost is not None else (known[0] <= found.token <= known[-1])


@given(st.floats(0.01, 3.0), st.floats(0.01, 3.0), st.floats(0.001, 0.3), st.floats(0.001, 0.3), st.integers(1, 500))
def test_what_is_quicker_in_both_uses_less(
    first: float, other: float, token: float, slower: float, output: int
) -> None:
    def used(ttft: float, tpot: float, slo: Slo) -> float:
        return objectives_used(slo, ttft, tpot, output)

    for slo in (Slo(ttft_ms=500.0, tpot_ms=50.0), Slo(ttft_ms=500.0), Slo(tpot_ms=50.0), Slo()):
        both = used(min(first, other), min(token, slower), slo), used(max(first, other), max(token, slower), slo)
        assert both[0] <= both[1]
    assert used(0.5, 0.05, Slo(ttft_ms=500.0, tpot_ms=50.0)) == pytest.approx(2.0)


def test_a_queue_is_no_near_tie_however_long_the_answer() -> None:
    """Both would meet its objectives, and the queue is a few per cent of the time to its last token."""
    queued, idle = worker("q", rows=8, waiting_seconds=0.3), worker("i", rows=8)
    for n in range(20):
        assert choose(wanting(ttft=3.0, output=1000, salt=n), queued, idle).prefill is idle


def test_a_decision_tells_what_was_considered() -> None:
    decision = choose(wanting(), worker("a"), worker("b", rows=20), worker("p", Role.PREFILL), worker("d", Role.DECODE))
    assert decision.considered[0].decode == (decision.decode.status.name if decision.decode else "")
    assert 1 < len(decision.considered) <= 8
    scores = [placed.score for placed in decision.considered[1:]]
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))
    assert all(placed.predicted is not None for placed in decision.considered)


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 5), st.sampled_from(list(Role))), min_size=1, max_size=8))
def test_predictions_are_finite_and_never_negative(fleet: list[tuple[int, float, Role]]) -> None:
    workers = [
        worker(f"w{n}", role, rows=rows if role is not Role.PREFILL else 0, waiting_seconds=seconds)
        for n, (rows, seconds, role) in enumerate(fleet)
    ]
    demand = wanting()
    decision = Goodput().choose(demand, lease_view(demand, workers), 0.0)
    if decision is None or decision.predicted is None:
        return
    predicted: Prediction = decision.predicted
    times = (predicted.queue, predicted.prefill, predicted.transfer, predicted.step, predicted.ttft, predicted.tpot)
    assert all(0.0 <= seconds < 1e6 for seconds in times)


def test_a_choice_among_many_workers_is_quick() -> None:
    """At most a millisecond with 256 workers on a quiet machine; ten here, since tests share theirs."""
    roles = list(Role)
    workers = [worker(f"w{n}", roles[n % 3], rows=n % 50 if n % 3 else 0) for n in range(256)]
    policy, best = Goodput(), 1.0
    for n in range(50):
        demand = wanting(salt=n)
        began = time.perf_counter()
        policy.choose(demand, lease_view(demand, workers), 0.0)
        best = min(best, time.perf_counter() - began)
    assert best < 0.01


# ---- who passes whom in a queue ------------------------------------------------------------------------------------

QUEUED = st.builds(
    QueuedPrompt,
    st.integers(-1, 1),
    st.floats(-5.0, 20.0) | st.just(inf),
    st.floats(0.001, 3.0),
    st.floats(-90.0, 0.0) | st.none(),
    st.floats(0.0, 1.0),
)


def test_a_prompt_that_is_due_soon_does_not_wait_for_those_that_are_not() -> None:
    """Two workers have as much to do: at one all of it may wait, at the other all of it is due sooner."""
    slack = worker("s", waiting_seconds=2.0, queued=[QueuedPrompt(0, 9.0, 1.0)] * 2)
    tight = worker("t", waiting_seconds=2.0, queued=[QueuedPrompt(0, 0.2, 0.1)] * 2)
    chosen = choose(wanting(ttft=0.5), slack, tight)
    assert chosen.prefill is slack and chosen.predicted is not None and chosen.predicted.queue == 0.0
    assert queue_seconds(QueuedPrompt(0, 0.5, 0.1), tight) == pytest.approx(2.0)
    assert queue_seconds(QueuedPrompt(1, 0.5, 0.1), slack) == pytest.approx(2.0), "priority goes first"


def test_it_does_not_pass_those_that_would_then_be_late() -> None:
    """It would be in time at both; at one it would make another one late."""
    behind = worker("b", waiting_seconds=0.8, queued=[QueuedPrompt(0, 1.1, 0.8)])
    spare = worker("s", waiting_seconds=0.3, queued=[QueuedPrompt(0, 0.4, 0.3)])
    assert choose(wanting(tokens=1000, ttft=1.05), behind, spare).prefill is spare


def test_prompts_that_are_held_back_for_a_tpot_are_no_risk_to_it() -> None:
    """A mixed worker that computes prompts all the time keeps its TPOTs; not where steps without them are too long."""
    calm, busy = (worker("w", rows=10, prompt_share=share) for share in (0.0, 0.9))
    crowded = worker("w", rows=60, prompt_share=0.9)
    tight = 3e3 * COST.seconds(StepLoad(11, 3300, 11, 3300))
    calm_score, busy_score, crowded_score = (
        choose(wanting(ttft=60.0, tpot_ms=tight), each).considered[0].score for each in (calm, busy, crowded)
    )
    assert busy_score == pytest.approx(calm_score, abs=0.01)
    assert crowded_score < busy_score - 0.3


@given(st.lists(QUEUED, max_size=12), QUEUED, st.floats(0.0, 30.0))
def test_a_prompt_waits_for_no_more_than_all_that_is_there(
    queued: list[QueuedPrompt], prompt: QueuedPrompt, waiting: float
) -> None:
    there = worker("w", waiting_seconds=waiting, queued=queued)
    waits = queue_seconds(prompt, there)
    sent = sum(other.seconds for other in queued)
    assert 0.0 <= waits <= max(backlog_seconds(there, COST, 0.0), sent) * (1 + 1e-9)
    hurried = prompt._replace(due=prompt.due - 1.0)
    assert queue_seconds(hurried, there) <= waits + 1e-9
    assert 0.0 <= queued_lost(prompt, there) <= len(queued)
    longer = prompt._replace(seconds=2 * prompt.seconds)
    assert queued_lost(longer, there) >= queued_lost(prompt, there) - 1e-9


def test_prompts_that_are_due_at_the_same_time_are_compared_by_nothing_else() -> None:
    queued = [QueuedPrompt(0, 5.0, 1.0, at) for at in (None, -1.0, None)]
    there = worker("w", waiting_seconds=3.0, queued=queued)
    assert queued_lost(QueuedPrompt(0, 1.0, 0.5), there) >= 0.0


@given(st.floats(0.0, 1e7) | st.none())
def test_requests_are_compared_with_those_as_urgent(ttft_ms: float | None) -> None:
    known, urgency = Calibration(), urgency_of(Slo(ttft_ms=ttft_ms))
    known.first_token("w", 1.0, 2.0, urgency)
    assert known.first("w", urgency).count == 1
    assert ttft_ms is None or urgency_of(Slo(ttft_ms=4 * ttft_ms)) >= urgency


async def test_the_router_knows_the_prompts_it_has_sent_until_their_first_token() -> None:
    world = World(policy="goodput")
    world.add("w", step_cost=COST)
    request = replace(wanted("r"), slo=Slo(ttft_ms=1000.0), priority=3)
    entry = world.fleet.registry.get("w-life")
    assert entry is not None
    seen = [entry.candidate.queued async for _ in world.router.generate(request)]
    assert seen and all(queued == () for queued in seen)
    reserved = world.fleet.reserve(entry.candidate, Dispatched(prompt_tokens=9, prompt_seconds=0.5), (3, 7.0))
    assert entry.candidate.queued == (QueuedPrompt(3, 7.0, 0.5, at=100.0),)
    world.fleet.heartbeat(entry.status)
    assert entry.candidate.queued == (QueuedPrompt(3, 7.0, 0.5, at=100.0),), (
        "a heartbeat does not say that it is computed"
    )
    reserved.release()
    assert list(entry.candidate.queued) == []
    await world.fleet.close()


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e308, 1e6, 0.0, -1.0])
async def test_a_worker_that_reports_nonsense_breaks_no_choice_and_does_not_draw_all(number: float) -> None:
    cost = StepCost(fixed=number, token=number, pair=number, sequence=number, context=number, error=number, samples=9)
    fields: list[dict[str, Any]] = [{"step_cost": cost}]
    if not 0.0 <= number <= 1e6:
        fields += [{"step_cost": COST, "waiting_seconds": number}, {"step_cost": COST, "prompt_share": number}]
    for odd in fields:
        world = World(policy="goodput")
        for name, own in (("odd", odd), ("fine", {"step_cost": COST})):
            world.add(name, running=3, context_tokens=900, **own)
        requests = [replace(wanted(f"r{n}"), slo=Slo(ttft_ms=1000.0, tpot_ms=100.0)) for n in range(30)]
        for request in requests:
            assert await world.tokens(request) == expected(request)
        assert len(world.workers["odd"].orders) < 30
        await world.fleet.close()


async def test_steps_that_cost_nothing_but_their_tokens_can_be_predicted() -> None:
    """A fit may come to no fixed cost: then a step of nothing takes nothing, beside prompts that were just computed."""
    world = World(policy="goodput")
    cost = StepCost(fixed=0.0, token=1e-4, sequence=1e-4, samples=100)
    world.add("m", step_cost=cost, prompt_share=0.5, max_batched_tokens=512)
    assert await world.tokens(wanted()) == expected(wanted())
    await world.fleet.close()
