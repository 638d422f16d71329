"""Copies keep to their bytes a second, whatever sizes they come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.expert_parallel.byte_budget import ByteBudget


@given(
    st.floats(1, 1e6), st.integers(1, 1000), st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), max_size=30)
)
def test_in_no_time_more_goes_than_is_allowed(rate: float, burst: int, spent: list[tuple[int, float]]) -> None:
    """Each spender comes after a pause and waits as long as told."""
    budget, now, went = ByteBudget(rate, burst, 5.0), 5.0, list[tuple[float, int]]()
    for size, pause in spent:
        now += pause
        now += budget.spend(min(size, burst), now)
        went.append((now, min(size, burst)))
    for first, (began, _) in enumerate(went):
        for last in range(first, len(went)):
            total = sum(size for _, size in went[first : last + 1])
            assert total <= burst + rate * (went[last][0] - began) + 1e-6 * total + 1e-3


def test_what_is_left_over_is_kept_up_to_a_burst() -> None:
    budget = ByteBudget(10.0, 20, 0.0)
    assert budget.spend(20, 0.0) == 0.0
    assert budget.spend(20, 0.0) == 2.0
    assert budget.spend(5, 100.0) == 0.0
    assert budget.spend(20, 100.0) == 0.5


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 5), (1.0, 0)])
def test_a_budget_of_nothing_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="lets nothing go"):
        ByteBudget(rate, burst, 0.0)


def test_more_than_a_burst_is_refused() -> None:
    with pytest.raises(ValueError, match="at once"):
        ByteBudget(1.0, 10, 0.0).spend(11, 0.0)
