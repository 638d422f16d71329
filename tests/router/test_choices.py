"""A choice is quick by computing nothing twice, and decides what its formulas say, number by number."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.arrivals import Arrivals
from router.breaker import BreakerConfig
from router.calibration import Calibration
from router.candidate import Candidate, Dispatched, QueuedPrompt
from router.chances import less_likely, sure_ratio, within
from router.goodput import Goodput
from router.link_costs import LinkCosts
from router.policy import Demand, FleetView
from router.trust import Trust, Ways
from serving.messages import TPOT_BINS_MS, Build, Role, Slo
from serving.step_cost import StepCost, StepLoad
from tests.router.plain_choice import plain_choice
from tests.router.scripted import make_status

NOW = 100.0
FLEETS = {
    "of every role": tuple(Role),
    "mixed": (Role.MIXED,),
    "split": (Role.PREFILL, Role.DECODE),
    "decode alone": (Role.DECODE,),
}


def a_worker(draw: random.Random, number: int, roles: tuple[Role, ...]) -> Candidate:
    """Busy or idle, with a cost of its own or none; numbers are drawn from few, so that there are ties."""
    role, rows, pace = draw.choice(roles), draw.choice((0, 0, 3, 8, 40)), draw.choice((0.5, 1.0, 1.0, 2.0))
    counts = [draw.choice((0, 0, 0, rows)) for _ in range(len(TPOT_BINS_MS) + 1)]
    cost = StepCost(
        fixed=draw.choice((0.0, 0.004, 0.02)) * pace,
        token=1e-4 * pace,
        pair=draw.choice((0.0, 1e-8)),
        sequence=5e-5,
        context=draw.choice((0.0, 2e-7)),
        error=draw.choice((0.0, 0.1, 0.6, 9.0, 400.0)),
        samples=100,
    )
    waits = draw.choice((0.0, 0.0, 0.3, 4.0))
    status = make_status(
        f"w{number}",
        role,
        step_cost=None if draw.random() < 0.1 else cost,
        waiting_seconds=waits,
        waiting_tokens=int(waits * 1e4),
        waiting=draw.choice((0, 5)),
        running=rows,
        leases=rows,
        context_tokens=500 * rows,
        tpot_counts=tuple(counts),
        prompt_share=draw.choice((0.0, 0.3, 1.0)),
        max_seqs=draw.choice((8, 64)),
        max_model_len=65_536,
        total_blocks=draw.choice((100, 5000)),
        free_blocks=draw.choice((0, 90)),
        max_batched_tokens=draw.choice((0, 512)),
        pairing=draw.choice(("model", "model", "new")),
    )
    queued = [
        QueuedPrompt(draw.choice((0, 1)), NOW + draw.uniform(-1, 5), draw.uniform(0.01, 1))
        for _ in range(draw.choice((0, 0, 3)))
    ]
    kinds = [
        Arrivals(draw.choice((0, 1)), draw.choice((0.0, 0.5, 8.0)), draw.uniform(0.01, 1), draw.uniform(0, 3))
        for _ in range(draw.choice((0, 2)))
    ]
    return Candidate(
        status,
        Dispatched(prompt_seconds=draw.choice((0.0, 0.2))),
        made_at=NOW - draw.choice((0.0, 1.0)),
        busy_until=draw.choice((None, NOW + 0.1)),
        queued=tuple(queued),
        decoding=draw.choice((0.5, 1.0)),
        arrivals=tuple(kinds),
    )


def a_demand(draw: random.Random, workers: list[Candidate]) -> Demand:
    tokens = draw.choice((1, 256, 1500, 32_000))
    ttft, tpot = draw.choice((None, 0.0, 50.0, 500.0, 8000.0)), draw.choice((None, 0.0, 5.0, 50.0, 500.0))
    return Demand(
        tokens=tokens,
        output=draw.choice((1, 2, 64, 1000)),
        build=draw.choice((None, None, Build("model", "model", ""))),
        cached={each.instance: draw.randrange(tokens) for each in workers if draw.random() < 0.2},
        slo=Slo(ttft_ms=ttft, tpot_ms=tpot),
        first_token_in=None if ttft is None else ttft / 1e3 - draw.choice((0.0, 0.2)),
        weight=draw.choice((1.0, 0.2)),
        priority=draw.choice((0, 1)),
        salt=draw.getrandbits(32),
        texts=draw.choice(((), ("code", "", "tenant"))),
    )


def learned(draw: random.Random, workers: list[Candidate]) -> Calibration:
    found = Calibration()
    for _ in range(draw.choice((0, 40))):
        there = draw.choice(workers).instance
        both = draw.random() < 0.5
        found.first_token(there, 0.1, 0.1 * draw.lognormvariate(0, 0.5), draw.choice((0, 6, 9, 13)), both=both)
        found.further_tokens(there, 0.02, 0.02 * draw.lognormvariate(0.2, 0.3), both=both)
        found.text_took(draw.randrange(40), 0.02 * draw.lognormvariate(0.0, 0.5), 0.02, both=both)
        found.steps_took(there, draw.uniform(1, 4), draw.choice(((), ("code", "", "tenant"))))
    return found


def a_view(draw: random.Random, workers: list[Candidate]) -> FleetView:
    """Over ways that cost, of which some are broken."""
    costs, trust = LinkCosts(), Trust(BreakerConfig(), stall=10.0)
    for _ in range(draw.choice((0, 20))):
        pair = draw.choice(workers).instance, draw.choice(workers).instance
        costs.observed(*pair, draw.choice((100, 4000)), draw.uniform(0, 0.1))
        if draw.random() < 0.3:
            trust.links.failed(*pair, NOW)
    decode = [worker for worker in workers if worker.decodes] if draw.random() < 0.9 else []
    prefill = [worker for worker in workers if worker.prefills]
    if decode and not prefill:
        prefill = decode[:1]  # its own prompts, as a last resort
    return FleetView(decode, prefill, Ways(trust, costs))


@pytest.mark.parametrize("fleet", FLEETS)
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 30))
def test_a_choice_is_what_its_formulas_say(fleet: str, seed: int, count: int) -> None:
    """Workers, reason, every number predicted, and all that was considered, in order."""
    draw = random.Random(seed)
    workers = [a_worker(draw, number, FLEETS[fleet]) for number in range(count)]
    view, policy = a_view(draw, workers), Goodput(learned(draw, workers))
    for _ in range(3):
        demand = a_demand(draw, workers)
        assert policy.choose(demand, view, NOW) == plain_choice(policy.calibration, demand, view, NOW)


@given(
    st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.sampled_from((0.0, 0.05, 0.1, 0.5, 3.0, 1e3, 1e4))
)
def test_chances_that_are_certain_are_so_to_the_last_bit(
    limit: float, before: float, after: float, error: float
) -> None:
    found = less_likely(limit, before, after, error, sure_ratio(error))
    assert found == within(limit, before, error) - within(limit, after, error)


@given(st.floats(0.001, 10.0), st.floats(0.0, 3.0), st.floats(1.0, 1.001))
def test_a_limit_is_certain_at_its_sure_ratio(predicted: float, error: float, more: float) -> None:
    far = sure_ratio(error) * more
    assert within(predicted * far, predicted, error) == 1.0 and within(predicted, predicted * far, error) == 0.0


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_a_step_of_one_chunk_is_that_of_its_load(start: int, count: int) -> None:
    cost = StepCost(fixed=0.0031, token=1.7e-4, pair=1.3e-8, sequence=3e-5, context=7e-8)
    assert cost.chunk_seconds(start, count) == cost.seconds(StepLoad.of(start, count))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.01, 5.0)), max_size=30), st.sampled_from("abcd"))
def test_what_was_asked_before_an_observation_is_not_told_after_it(seen: list[tuple[str, float]], asked: str) -> None:
    known = Calibration()
    for name, observed in seen:
        known.further_tokens(name, 1.0, observed)
        fresh = Calibration.from_kept(known.kept())
        for each in ("", asked):
            now, then = known.further(each), fresh.further(each)
            assert (now.factor, now.error) == pytest.approx((then.factor, then.error))


def test_a_worker_that_changes_is_seen_anew() -> None:
    """Nothing that was computed for one request is kept for the next but what the worker has computed itself."""
    draw = random.Random(3)
    workers = [a_worker(draw, number, (Role.MIXED,)) for number in range(6)]
    view, policy, demand = a_view(draw, workers), Goodput(), Demand(tokens=200, output=20)
    first = policy.choose(demand, view, NOW)
    assert first is not None and first.decode is not None
    busy = replace(first.decode, busy_until=NOW + 60.0)
    changed = [busy if each is first.decode else each for each in view.decode]
    second = policy.choose(demand, FleetView(changed, changed, view.links), NOW)
    assert second is not None and second.decode is not busy
