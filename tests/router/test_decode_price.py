"""What a text costs the prompts of the worker where it decodes, and that it goes where it costs them nothing."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.arrivals import Arrivals
from router.calibration import Calibration, Drift
from router.candidate import Candidate
from router.decode_price import prompts_slowed
from router.goodput import Goodput
from router.prompt_steps import PromptSteps
from router.registry import believable
from serving.messages import Role
from serving.step_cost import StepCost
from tests.router.costed import COST, choose, wanting, worker
from tests.router.scripted import make_status

CHATS = Arrivals(priority=0, limit=0.25, seconds=0.15, rate=10.0)
TEXT = 288.0  # tokens
NUMBERS = st.just(0.0) | st.floats(0.0, 1e4, allow_subnormal=True) | st.sampled_from([5e-324, 1e-310, 1e-300, 9999.0])


def busy(name: str, rows: int, *kinds: Arrivals, role: Role = Role.MIXED) -> Candidate:
    """A worker where so many texts decode, and prompts of these kinds have lately been in time."""
    return replace(worker(name, role, rows=rows), arrivals=kinds)


def price(there: Candidate, lasts: float = 2.0, tpot: float | None = 0.1) -> float:
    return prompts_slowed(there, PromptSteps(there, COST, tpot), TEXT, lasts, Drift(), 0.0)


@given(
    st.integers(0, 60),
    st.floats(0.0, 30.0),
    st.floats(0.001, 1.0) | st.none(),
    st.lists(st.builds(Arrivals, st.integers(0, 2), st.floats(0.0, 9.0), st.floats(0.01, 1.0), st.floats(0.0, 9.0))),
)
def test_a_longer_text_never_costs_less(rows: int, lasts: float, tpot: float | None, kinds: list[Arrivals]) -> None:
    there = busy("m", rows, *kinds)
    assert 0.0 <= price(there, lasts, tpot) <= price(there, lasts + 1.0, tpot)


def test_a_worker_where_no_prompts_are_in_time_loses_none() -> None:
    assert price(busy("m", 5)) == 0.0
    assert price(busy("m", 5, CHATS._replace(limit=0.001))) == pytest.approx(0.0, abs=1e-6)
    assert price(busy("m", 5, CHATS)) > 0.1


def test_a_text_among_few_is_charged_more_than_one_among_many() -> None:
    """The first slows prompts down the most, so that the next ones gather there."""
    prices = [price(busy("m", rows, CHATS)) for rows in (0, 1, 2, 4)]
    assert prices == sorted(prices, reverse=True) and prices[0] > 1.5 * prices[-1]


def test_a_text_leaves_the_time_of_a_mixed_worker_to_prompts() -> None:
    """A step at the worker that only decodes is longer, and all of its objective is kept there all the same."""
    decode, prefill = worker("d", Role.DECODE, rows=20), worker("p", Role.PREFILL)
    idle, wanted = busy("m", 2), busy("m", 2, CHATS)
    assert choose(wanting(), idle, decode, prefill).decode is idle
    assert choose(wanting(), wanted, decode, prefill).decode is decode


@given(
    st.builds(
        StepCost,
        fixed=NUMBERS, token=NUMBERS, pair=NUMBERS, sequence=NUMBERS, context=NUMBERS, error=NUMBERS,
        samples=st.integers(0, 1),
    ),
    st.sampled_from([0, 1, 512, (1 << 32) - 1]),
    st.integers(0, 64),
)  # fmt: skip
def test_whatever_costs_a_worker_tells_of_a_request_is_placed(cost: StepCost, most: int, rows: int) -> None:
    """A worker may tell of any: what it says must not keep requests from the others."""
    told = make_status("m", step_cost=cost, max_batched_tokens=most, running=rows, leases=rows, total_blocks=10_000)
    odd = replace(Candidate(believable(told)), arrivals=(CHATS,))
    decision = choose(wanting(), odd, worker("d", Role.DECODE), worker("p", Role.PREFILL))
    assert all(each.score is not None and isfinite(each.score) for each in decision.considered)


def test_where_all_workers_are_mixed_nothing_is_charged() -> None:
    """A text and its prompt then go to one worker, whatever both cost."""
    there = busy("m", 2, CHATS)
    beside, alone = (choose(wanting(), there, *others) for others in ((worker("p", Role.PREFILL),), ()))
    (own,) = (each for each in beside.considered if each.prefill == each.decode == "m")
    assert own.predicted is not None
    score = alone.considered[0].score
    assert score is not None and own.score == pytest.approx(score - price(there, own.predicted.token * 64))


def test_corrections_are_kept_apart_for_workers_that_do_both() -> None:
    known = Calibration()
    for _ in range(50):
        known.first_token("m", 1.0, 2.0, both=True)
        known.further_tokens("m", 1.0, 2.0, both=True)
        known.first_token("p", 1.0, 1.0)
        known.further_tokens("d", 1.0, 1.0)
    for each in (known, Calibration.from_kept(known.kept())):
        assert each.first("p").factor == each.further("d").factor == pytest.approx(1.0)
        assert each.first("m", both=True).factor == each.further("m", both=True).factor == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("samples", [0, 100])
def test_what_came_of_a_guess_teaches_nothing(samples: int) -> None:
    policy = Goodput()
    decision = choose(wanting(), worker("w", step_cost=replace(COST, samples=samples)), policy=policy)
    policy.observed(decision, ttft=0.3, tpot=0.05)
    counts = [policy.calibration.first("w-life", 10, both=True).count, policy.calibration.further("", both=True).count]
    assert counts == ([1, 1] if samples else [0, 0])
