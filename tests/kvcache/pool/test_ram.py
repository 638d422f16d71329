"""The RAM tier: what it holds fits, what has to go is handed back, and pins hold for their time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.block import PoolBlock
from kvcache.pool.blockfile import stored_bytes
from kvcache.pool.eviction import Pins, QuotaLru, Quotas
from kvcache.pool.ram import RamTier
from tests.kvcache.pool.storage import block_of, key_of

ONE = stored_bytes(block_of(0))


def tier(blocks: float, quotas: Quotas | None = None) -> RamTier:
    return RamTier(QuotaLru(round(blocks * ONE), quotas or Quotas()))


def keys(blocks: list[PoolBlock] | None) -> list[bytes]:
    assert blocks is not None
    return [block.key for block in blocks]


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "pin", "drop"]), st.integers(0, 12), st.integers(1, 250), st.booleans()),
    max_size=80,
)


@given(steps=STEPS)
def test_capacity_and_pins_hold_and_nothing_gets_lost(steps: list[tuple[str, int, int, bool]]) -> None:
    ram, pins = tier(4), Pins()
    expected: dict[bytes, PoolBlock] = {}
    for now, (step, number, size, tenant) in enumerate(steps):
        pins.expire(float(now))
        key = key_of(number)
        if step == "put":
            block = block_of(number, size=size, namespace="tenant" if tenant else "default")
            gone = ram.put(block, stored_at=float(now), now=float(now), pinned=pins)
            if gone is not None and key not in expected:
                expected[key] = block
            for one in gone or ():
                assert one.key not in pins
                assert expected.pop(one.key) is one
        elif step == "get":
            ram.lru.touch(key)
        elif step == "pin" and key in ram:
            pins.pin(key, now + 5.0)
        elif step == "drop":
            assert ram.remove(key) is expected.pop(key, None)
        assert {block.key: block for block in ram} == expected
        assert all(ram.get(key) is block for key, block in expected.items())
        assert sum(map(stored_bytes, ram)) == ram.lru.bytes <= ram.lru.capacity


def test_a_block_that_is_here_already_stays_and_counts_as_used() -> None:
    ram = tier(2)
    first = block_of(0)
    for block in (first, block_of(1), block_of(0)):
        assert ram.put(block, stored_at=0.0, now=0.0) == []
    assert ram.get(key_of(0)) is first and ram.lru.stat().blocks == 2
    assert keys(ram.put(block_of(2), stored_at=0.0, now=0.0)) == [key_of(1)]


def test_a_pinned_block_stays_until_its_time_is_over() -> None:
    ram, pins = tier(2), Pins()
    for number in (0, 1):
        ram.put(block_of(number), stored_at=0.0, now=0.0)
    pins.pin(key_of(0), 10.0)
    assert keys(ram.put(block_of(2), stored_at=1.0, now=1.0, pinned=pins)) == [key_of(1)]
    pins.pin(key_of(2), 10.0)
    assert ram.put(block_of(3), stored_at=2.0, now=2.0, pinned=pins) is None
    pins.expire(10.0)
    assert keys(ram.put(block_of(3), stored_at=10.0, now=10.0, pinned=pins)) == [key_of(0)]


def test_without_capacity_every_block_is_refused() -> None:
    assert tier(0).put(block_of(0), stored_at=0.0, now=0.0) is None


def test_age_counts_from_when_the_block_was_stored_not_from_when_it_came_up() -> None:
    ram = tier(1)
    ram.put(block_of(0), stored_at=2.0, now=50.0)
    ram.put(block_of(1), stored_at=62.0, now=62.0)
    stat = ram.lru.stat()
    assert (stat.evictions, stat.eviction_age_seconds) == (1, 60.0)
    assert (stat.bytes, stat.capacity) == (ONE, ONE)
    assert stat.bytes_written == 2 * len(block_of(0).payload)
