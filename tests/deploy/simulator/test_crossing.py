"""The search for a rate: it ends, near the crossing, and says how much it knows wherever it is stopped."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulator.crossing import Crossing


def share(rate: float, crossing: float, steepness: float) -> float:
    """0.9 at the crossing, and falling through it."""
    return 1.0 / (1.0 + exp(steepness * (rate / crossing - 1.0)) / 9.0)


@given(st.floats(0.5, 500.0), st.floats(5.0, 60.0), st.floats(0.2, 4.0))
def test_it_comes_to_the_crossing(crossing: float, steepness: float, guess: float) -> None:
    search = Crossing(crossing * guess)
    for _ in range(30):
        if search.over:
            break
        rate = search.next_rate()
        assert rate not in search.attained and rate > 0
        search.attained[rate] = share(rate, crossing, steepness)
    assert search.over and search.goodput is not None
    assert search.goodput == pytest.approx(crossing, rel=search.tolerance)


@given(st.dictionaries(st.floats(0.5, 50.0), st.floats(0.0, 1.0), max_size=8))
def test_a_goodput_lies_between_a_rate_that_attains_and_one_that_does_not(attained: dict[float, float]) -> None:
    search = Crossing(1.0, attained=attained)
    if search.goodput is None:
        assert search.passing is None or search.failing is None
    else:
        assert search.passing is not None and search.failing is not None
        assert search.passing <= search.goodput <= search.failing
        assert attained[search.passing] >= 0.9 > attained[search.failing]


def test_the_farther_from_what_is_wanted_the_larger_the_step() -> None:
    near, far = Crossing(1.0, attained={100.0: 0.91}), Crossing(1.0, attained={100.0: 1.0})
    assert 100 < near.next_rate() < far.next_rate()
    hardly, never = Crossing(1.0, attained={100.0: 0.89}), Crossing(1.0, attained={100.0: 0.3})
    assert 100 > hardly.next_rate() > never.next_rate()
