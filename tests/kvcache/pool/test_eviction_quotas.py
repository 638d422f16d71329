"""What a shelf keeps for whom: capacity, quotas and pins, whatever the policy, and how tenants compete beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.eviction import POLICIES
from kvcache.pool.shelf import Pins, Quotas, Shelf
from tests.kvcache.pool.storage import key_of

NAMESPACES = ("a", "b", "c", "d")
INSERTS = st.lists(
    st.tuples(st.sampled_from(NAMESPACES), st.integers(0, 60), st.integers(1, 30), st.booleans()), max_size=120
)
QUOTAS = st.fixed_dictionaries({}, optional={name: st.integers(0, 60) for name in NAMESPACES})


def held_bytes(shelf: Shelf) -> dict[str, int]:
    return {name: sum(held.size for held in shelf if held.namespace == name) for name in NAMESPACES}


def admit(shelf: Shelf, number: int, namespace: str, size: int, pins: Pins | None = None) -> list[bytes] | None:
    gone = shelf.admit(key_of(number), namespace, size, stored_at=0.0, now=1.0, pinned=pins or ())
    return None if gone is None else [held.key for held in gone]


@pytest.mark.parametrize("policy", POLICIES)
@given(inserts=INSERTS, quotas=QUOTAS, default=st.sampled_from([0, 0, 10]))
def test_nobody_is_pushed_below_his_quota_and_nothing_grows_beyond_capacity(
    policy: str, inserts: list[tuple[str, int, int, bool]], quotas: dict[str, int], default: int
) -> None:
    shelf = Shelf(100, policy, Quotas(by_namespace=quotas, default=default))
    pins = Pins()
    for namespace, number, size, pin in inserts:
        if key_of(number) in shelf:
            shelf.touch(key_of(number))
            if pin:
                pins.pin(key_of(number), 1.0)
            continue
        before = held_bytes(shelf)
        present = {held.key for held in shelf}
        gone = admit(shelf, number, namespace, size, pins)
        after = held_bytes(shelf)
        assert shelf.bytes == sum(after.values()) <= shelf.capacity
        for other in set(NAMESPACES) - {namespace}:
            assert after[other] >= min(before[other], quotas.get(other, default))
        assert not any(key in pins for key in gone or ())
        taken = set() if gone is None else {key_of(number)}
        assert {held.key for held in shelf} == (present - set(gone or ())) | taken


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_leaves_the_quota_and_takes_the_rest(policy: str) -> None:
    shelf = Shelf(1000, policy, Quotas(by_namespace={"a": 300}))
    for number in range(100):
        admit(shelf, number, "a", 10)
    assert held_bytes(shelf)["a"] == 1000
    for number in range(1000, 2000):
        assert admit(shelf, number, "b", 10) is not None
    assert held_bytes(shelf) == {"a": 300, "b": 700, "c": 0, "d": 0}
    for held in [held for held in shelf if held.namespace == "a"][:20]:
        shelf.remove(held.key)
    for number in range(3000, 3020):
        admit(shelf, number, "b", 10)
    assert held_bytes(shelf) == {"a": 100, "b": 900, "c": 0, "d": 0}
    for number in range(4000, 4020):  # within its quota again, it takes from the one beyond his
        admit(shelf, number, "a", 10)
    assert held_bytes(shelf) == {"a": 300, "b": 700, "c": 0, "d": 0}


def test_beyond_quotas_the_stalest_block_goes_whosever_it_is() -> None:
    shelf = Shelf(60, "lru", Quotas(by_namespace={"a": 10, "b": 10}))
    for number, namespace in enumerate("abcabc"):
        admit(shelf, number, namespace, 10)
    shelf.touch(key_of(0))
    assert admit(shelf, 10, "c", 10) == [key_of(1)]  # b's older one; a's was used
    assert admit(shelf, 11, "c", 10) == [key_of(2)]
    assert admit(shelf, 12, "c", 10) == [key_of(3)]  # a's; what is left of a and b are their quotas
    assert admit(shelf, 13, "c", 10) == [key_of(5)]


def test_who_has_no_claim_to_room_is_refused_and_nothing_goes_for_him() -> None:
    shelf = Shelf(40, "lru", Quotas(by_namespace={"a": 20, "b": 20}))
    for number, namespace in enumerate("aabb"):
        admit(shelf, number, namespace, 10)
    assert admit(shelf, 10, "c", 10) is None
    assert admit(shelf, 11, "c", 41) is None
    assert len(shelf) == 4
    assert admit(shelf, 12, "a", 10) == [key_of(0)]  # room is made among one's own
    assert held_bytes(shelf) == {"a": 20, "b": 20, "c": 0, "d": 0}


def test_an_insert_that_cannot_succeed_puts_back_what_it_had_taken() -> None:
    shelf = Shelf(40, "lru", Quotas())
    pins = Pins()
    for number in range(4):
        admit(shelf, number, "a", 10)
    pins.pin(key_of(3), 9.0)
    assert admit(shelf, 10, "b", 35, pins) is None
    assert {held.key for held in shelf} == {key_of(number) for number in range(4)}
    assert shelf.bytes == 40 and shelf.counters.evictions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_pins_in_one_queue_do_not_hide_the_other(policy: str) -> None:
    shelf = Shelf(100, policy, Quotas())
    pins = Pins()
    for number in range(10):
        admit(shelf, number, "a", 10)
    for number in range(9):
        for _ in range(3):
            shelf.touch(key_of(number))
        pins.pin(key_of(number), 9.0)
    assert admit(shelf, 10, "a", 10, pins) == [key_of(9)]
    assert admit(shelf, 11, "a", 10, pins) == [key_of(10)]


def test_the_quota_of_a_smaller_tier_is_a_share() -> None:
    quotas = Quotas(by_namespace={"a": 100}, default=10, scale=0.5)
    assert quotas.of("a") == 50 and quotas.of("b") == 5


def test_a_pin_lasts_as_long_as_the_longest_that_was_asked_for() -> None:
    pins = Pins()
    pins.pin(key_of(0), 5.0)
    pins.pin(key_of(0), 9.0)
    pins.pin(key_of(0), 7.0)
    pins.pin(key_of(1), 6.0)
    pins.expire(6.0)
    assert key_of(0) in pins and key_of(1) not in pins and len(pins) == 1
    pins.expire(9.0)
    assert len(pins) == 0
    pins.pin(key_of(0), 12.0)
    pins.release(key_of(0))
    pins.expire(20.0)
    assert len(pins) == 0


def test_evictions_are_counted_with_their_age() -> None:
    shelf = Shelf(20, "lru", Quotas())
    for number, time in enumerate((1.0, 2.0, 4.0, 8.0)):
        shelf.admit(key_of(number), "a", 10, stored_at=time, now=time)
    stat = shelf.stat()
    assert stat.evictions == 2
    assert stat.eviction_age_seconds == pytest.approx((4.0 - 1.0) + (8.0 - 2.0))


def test_thousands_of_namespaces_leave_nothing_behind() -> None:
    shelf = Shelf(50, "lru", Quotas(default=5))
    for number in range(2000):
        admit(shelf, number, f"tenant-{number}", 5)
    assert len(shelf._groups) <= 11
    for held in list(shelf):
        shelf.remove(held.key)
    assert not shelf._groups
