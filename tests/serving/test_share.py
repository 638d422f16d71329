"""Means over the last seconds: shares that many looks at once cannot change, rates that fade."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.share import MEAN_SECONDS, Rate, Share

LOOKS = st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9), st.floats(-5, 100)), max_size=30)


@given(LOOKS)
def test_a_share_is_one(looks: list[tuple[int, int, float]]) -> None:
    share, now = Share(), 0.0
    for part, whole, later in looks:
        now += later
        assert 0.0 <= share.look(part, whole, now) <= 1.0


def test_a_share_comes_to_what_is_seen() -> None:
    share = Share()
    for second in range(100):
        share.look(1, 4, float(second))
    assert share.share == pytest.approx(0.25, abs=0.01)


def test_many_looks_at_once_change_nothing() -> None:
    share = Share()
    assert [share.look(0, 50, 7.0) for _ in range(1000)][-1] == 1.0


def test_a_rate_is_that_of_what_comes_and_fades() -> None:
    rate = Rate()
    for number in range(1000):
        rate.note(2.0, number / 10)
    assert rate.of(100.0) == pytest.approx(20.0, rel=0.02)
    assert rate.of(100.0 + 5 * MEAN_SECONDS) < 0.2 and rate.of(0.0) >= rate.of(100.0), "an older time is now"
