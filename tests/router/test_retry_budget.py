"""The retry budget: retries beyond it wait, in order and at its rate; what is saved up is bounded."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from router.retry_budget import RetryBudget, RetryConfig, backoff

CONFIG = RetryConfig(share=0.2, per_second=10.0, most=5.0)


def test_a_full_budget_lets_retries_through_and_then_they_wait_in_order() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    waits = [budget.retry(0.0) for _ in range(8)]
    assert waits[:5] == [0.0] * 5
    assert [round(wait, 6) for wait in waits[5:]] == [0.1, 0.2, 0.3]


def test_requests_earn_their_share() -> None:
    budget = RetryBudget(CONFIG, 0.0)
    for _ in range(5):
        budget.retry(0.0)
    for _ in range(5):
        budget.request(0.0)
    assert budget.retry(0.0) == 0.0 and budget.retry(0.0) > 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["request", "retry"]), st.floats(0, 2, allow_nan=False)), min_size=1, max_size=200
    )
)
def test_retries_let_go_within_any_time_are_bounded(events: list[tuple[str, float]]) -> None:
    """Until any moment: what was saved up, what requests earned, and what time did."""
    budget, now, requests, gone = RetryBudget(CONFIG, 0.0), 0.0, 0, []
    for kind, pause in events:
        now += pause
        if kind == "request":
            budget.request(now)
            requests += 1
        else:
            wait = budget.retry(now)
            assert wait >= 0.0
            assert not gone or now + wait >= gone[-1] - 0.2 * requests / CONFIG.per_second - 1e-6
            gone.append(now + wait)
        assert budget.balance <= CONFIG.most
        let = sum(at <= now for at in gone)
        assert let <= CONFIG.most + CONFIG.share * requests + CONFIG.per_second * now + 1e-6


def test_a_clock_that_stands_still_or_goes_back_earns_nothing() -> None:
    budget = RetryBudget(CONFIG, 10.0)
    for _ in range(5):
        budget.retry(10.0)
    assert budget.retry(9.0) > 0.0


@given(st.integers(0, 2**32 - 1))
def test_a_request_backs_off_from_its_second_failure_in_a_row(salt: int) -> None:
    pauses = [backoff(failures, 0.1, salt) for failures in range(1, 9)]
    assert pauses[0] == 0.0
    for doubled, pause in enumerate(pauses[1:]):
        assert 0.05 * 2**doubled <= pause <= 0.1 * 2**doubled
    assert sum(pauses) > 6.0, "nine tries outlast a storm of some seconds"
    assert backoff(10**6, 0.1, salt) < 10**5


def test_requests_that_broke_together_are_tried_apart() -> None:
    assert len({round(backoff(3, 0.1, salt), 4) for salt in range(100)}) > 90


def test_without_a_rate_only_what_is_saved_and_earned_is_let_go() -> None:
    budget = RetryBudget(RetryConfig(share=0.5, per_second=0.0, most=2.0), 0.0)
    assert [budget.retry(0.0) for _ in range(4)] == [0.0, 0.0, math.inf, math.inf]
    budget.request(9.0)
    assert budget.retry(1e6) == math.inf, "half of one is saved up"
    budget.request(9.0)
    assert budget.retry(1e6) == 0.0


@given(st.lists(st.booleans(), max_size=50), st.floats(0.0, 1.0))
@example([True] * 6, 5e-324)
def test_retries_that_are_not_made_cost_those_behind_them_nothing(made: list[bool], rate: float) -> None:
    """Only the retries that were made have been taken from the budget."""
    budget, only = (RetryBudget(RetryConfig(per_second=rate, most=5.0), 0.0) for _ in range(2))
    for let_go in made:
        pause = budget.retry(0.0)
        if not let_go or pause == math.inf:
            budget.give_back(pause)
        else:
            only.retry(0.0)
    assert budget.balance == only.balance
