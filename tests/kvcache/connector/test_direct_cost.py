"""From the pool or from a prefill worker: from what both have taken so far."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.connector.fetch_cost import PROBE_EVERY, DirectCost, FetchCost, HandoffMeter

SECONDS_A_BYTE = st.floats(1e-12, 1e-7)


def metered(*seconds: float, size: int = 1000) -> HandoffMeter:
    """A handoff whose chunks came so long after one another."""
    meter, now = HandoffMeter(), 5.0
    meter.came(size, now)
    for gap in seconds:
        now += gap
        meter.came(size, now)
    return meter


def measured(pool: float, handoff: float, answer: float = 0.0) -> DirectCost:
    """Seconds a byte by either way, and of the pool's answer."""
    fetch = FetchCost()
    fetch.answer_seconds = answer
    fetch.fetched(1000, 1000 * pool)
    cost = DirectCost(fetch)
    cost.byte_seconds = handoff
    return cost


def test_unmeasured_it_is_worth_trying() -> None:
    assert DirectCost(FetchCost()).pays(1 << 30)
    cost = DirectCost(FetchCost())
    cost.handed_over(metered(1e-9))
    assert cost.pays(1 << 30), "the pool has not been measured"
    assert measured(1.0, 1e-9).pays(1) is False


@given(SECONDS_A_BYTE, SECONDS_A_BYTE, st.floats(0, 0.1), st.integers(1, 1 << 30))
def test_the_quicker_way_is_chosen(pool: float, handoff: float, answer: float, size: int) -> None:
    direct, through = answer + size * pool, size * handoff
    pays = measured(pool, handoff, answer).pays(size)
    if direct < 0.99 * through:
        assert pays
    if direct > 1.01 * through:
        assert not pays


@given(SECONDS_A_BYTE, SECONDS_A_BYTE, st.floats(0, 0.1), st.integers(1, 1 << 30), st.integers(0, 1 << 30))
def test_what_pays_for_some_bytes_pays_for_more(
    pool: float, handoff: float, answer: float, size: int, more: int
) -> None:
    if measured(pool, handoff, answer).pays(size):
        assert measured(pool, handoff, answer).pays(size + more)


@given(SECONDS_A_BYTE, st.integers(1, 1 << 30))
def test_waiting_as_long_as_the_other_way_takes_at_most_doubles_it(handoff: float, size: int) -> None:
    assert measured(1.0, handoff).patience(size) == size * handoff
    assert DirectCost(FetchCost()).patience(size) is None


def test_a_slow_pool_is_tried_again_now_and_then() -> None:
    cost = measured(1e-6, 1e-9)
    assert [cost.pays(1000) for _ in range(3 * PROBE_EVERY)].count(True) == 3


def test_a_pool_that_failed_is_left_alone_for_a_while() -> None:
    for cost in (measured(1e-9, 1e-6), DirectCost(FetchCost())):
        cost.failed()
        assert [cost.pays(1000) for _ in range(PROBE_EVERY + 2)] == [False] * PROBE_EVERY + [True] * 2


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=5))
def test_a_handoff_is_judged_by_the_piece_that_waited_for_no_step(gaps: list[float]) -> None:
    seconds = metered(*gaps).byte_seconds
    assert seconds is not None and abs(seconds - min(gaps) / 1000) < 1e-12


def test_a_handoff_of_one_piece_says_nothing() -> None:
    cost = DirectCost(FetchCost())
    cost.handed_over(metered())
    assert cost.byte_seconds is None


def test_newer_handoffs_weigh_more() -> None:
    cost = DirectCost(FetchCost())
    for _ in range(50):
        cost.handed_over(metered(1.0))
    for _ in range(50):
        cost.handed_over(metered(2.0))
    assert cost.byte_seconds is not None and abs(cost.byte_seconds - 2e-3) < 1e-6
