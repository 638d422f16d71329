"""What a tier keeps: least recently used first to go, within capacity, quotas and pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.eviction import BlockRecord, Pins, QuotaLru
from kvcache.pool.storeconfig import StoreConfig
from tests.kvcache.pool.storage import key_of

NAMESPACES = ("a", "b", "c", "d")
INSERTS = st.lists(
    st.tuples(st.sampled_from(NAMESPACES), st.integers(0, 60), st.integers(1, 30), st.booleans()), max_size=120
)
QUOTAS = st.fixed_dictionaries({}, optional={name: st.integers(0, 60) for name in NAMESPACES})


def quotas_of(by_namespace: Mapping[str, int], default: int = 0) -> Callable[[str], int]:
    return lambda namespace: by_namespace.get(namespace, default)


def bytes_of(lru: QuotaLru) -> dict[str, int]:
    return {name: sum(record.size for record in lru if record.namespace == name) for name in NAMESPACES}


def admit(lru: QuotaLru, number: int, namespace: str, size: int, pins: Pins | None = None) -> list[bytes] | None:
    gone = lru.admit(BlockRecord(key_of(number), namespace, size, stored_at=0.0), 1.0, pins or ())
    return None if gone is None else [record.key for record in gone]


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, 7)), max_size=80))
def test_what_was_used_longest_ago_goes_first(steps: list[tuple[str, int]]) -> None:
    lru, order = QuotaLru(5), list[int]()
    for step, number in steps:
        if step == "add" and number not in order:
            gone = [order.pop(0)] if len(order) == 5 else []
            assert admit(lru, number, "a", 1) == [key_of(one) for one in gone]
            order.append(number)
        elif step == "touch":
            lru.touch(key_of(number))
            if number in order:
                order.append(order.pop(order.index(number)))
        elif step == "remove" and number in order:
            lru.remove(key_of(number))
            order.remove(number)
        assert {record.key for record in lru} == {key_of(one) for one in order}


@given(inserts=INSERTS, quotas=QUOTAS, default=st.sampled_from([0, 0, 10]))
def test_nobody_is_pushed_below_his_quota_and_nothing_grows_beyond_capacity(
    inserts: list[tuple[str, int, int, bool]], quotas: dict[str, int], default: int
) -> None:
    lru = QuotaLru(100, quotas_of(quotas, default))
    pins = Pins()
    for namespace, number, size, pin in inserts:
        if key_of(number) in lru:
            lru.touch(key_of(number))
            if pin:
                pins.pin(key_of(number), 1.0)
            continue
        before = bytes_of(lru)
        present = {record.key for record in lru}
        gone = admit(lru, number, namespace, size, pins)
        after = bytes_of(lru)
        assert lru.bytes == sum(after.values()) <= lru.capacity
        for other in set(NAMESPACES) - {namespace}:
            assert after[other] >= min(before[other], quotas.get(other, default))
        assert not any(key in pins for key in gone or ())
        taken = set() if gone is None else {key_of(number)}
        assert {record.key for record in lru} == (present - set(gone or ())) | taken


def test_a_flood_leaves_the_quota_and_takes_the_rest() -> None:
    lru = QuotaLru(1000, quotas_of({"a": 300}))
    for number in range(100):
        admit(lru, number, "a", 10)
    assert bytes_of(lru)["a"] == 1000
    for number in range(1000, 2000):
        assert admit(lru, number, "b", 10) is not None
    assert bytes_of(lru) == {"a": 300, "b": 700, "c": 0, "d": 0}
    for record in [record for record in lru if record.namespace == "a"][:20]:
        lru.remove(record.key)
    for number in range(3000, 3020):
        admit(lru, number, "b", 10)
    assert bytes_of(lru) == {"a": 100, "b": 900, "c": 0, "d": 0}
    for number in range(4000, 4020):  # within its quota again, it takes from the one beyond his
        admit(lru, number, "a", 10)
    assert bytes_of(lru) == {"a": 300, "b": 700, "c": 0, "d": 0}


def test_beyond_quotas_the_stalest_block_goes_whosever_it_is() -> None:
    lru = QuotaLru(60, quotas_of({"a": 10, "b": 10}))
    for number, namespace in enumerate("abcabc"):
        admit(lru, number, namespace, 10)
    lru.touch(key_of(0))
    assert admit(lru, 10, "c", 10) == [key_of(1)]  # b's older one; a's was used
    assert admit(lru, 11, "c", 10) == [key_of(2)]
    assert admit(lru, 12, "c", 10) == [key_of(3)]  # a's; what is left of a and b are their quotas
    assert admit(lru, 13, "c", 10) == [key_of(5)]


def test_who_has_no_claim_to_room_is_refused_and_nothing_goes_for_him() -> None:
    lru = QuotaLru(40, quotas_of({"a": 20, "b": 20}))
    for number, namespace in enumerate("aabb"):
        admit(lru, number, namespace, 10)
    assert admit(lru, 10, "c", 10) is None
    assert admit(lru, 11, "c", 41) is None
    assert len(lru) == 4
    assert admit(lru, 12, "a", 10) == [key_of(0)]  # room is made among one's own
    assert bytes_of(lru) == {"a": 20, "b": 20, "c": 0, "d": 0}


def test_an_insert_that_cannot_succeed_puts_back_what_it_had_taken() -> None:
    lru = QuotaLru(40)
    pins = Pins()
    for number in range(4):
        admit(lru, number, "a", 10)
    pins.pin(key_of(3), 9.0)
    assert admit(lru, 10, "b", 35, pins) is None
    assert {record.key for record in lru} == {key_of(number) for number in range(4)}
    assert lru.bytes == 40 and lru.counters.evictions == 0


def test_pins_in_one_queue_do_not_hide_the_other() -> None:
    lru = QuotaLru(100)
    pins = Pins()
    for number in range(10):
        admit(lru, number, "a", 10)
    for number in range(9):
        for _ in range(3):
            lru.touch(key_of(number))
        pins.pin(key_of(number), 9.0)
    assert admit(lru, 10, "a", 10, pins) == [key_of(9)]
    assert admit(lru, 11, "a", 10, pins) == [key_of(10)]


def test_the_quota_of_a_smaller_tier_is_a_share() -> None:
    config = StoreConfig(ram_bytes=500, disk_path=Path("pool"), disk_bytes=1000, quotas={"a": 100}, default_quota=10)
    assert [config.lru(500).quota_of(name) for name in "ab"] == [50, 5]
    assert [config.lru(1000).quota_of(name) for name in "ab"] == [100, 10]


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
    lru = QuotaLru(20)
    for number, time in enumerate((1.0, 2.0, 4.0, 8.0)):
        lru.admit(BlockRecord(key_of(number), "a", 10, stored_at=time), time)
    stat = lru.stat()
    assert stat.evictions == 2
    assert stat.eviction_age_seconds == pytest.approx((4.0 - 1.0) + (8.0 - 2.0))


def test_thousands_of_namespaces_leave_nothing_behind() -> None:
    lru = QuotaLru(50, quotas_of({}, 5))
    for number in range(2000):
        admit(lru, number, f"tenant-{number}", 5)
    assert len(lru._groups) <= 11
    for record in list(lru):
        lru.remove(record.key)
    assert not lru._groups
