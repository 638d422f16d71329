"""The RAM tier: what it holds fits, what has to go is named, and pins hold for their time."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvcache.pool.block import PoolBlock
from kvcache.pool.blockfile import stored_bytes
from kvcache.pool.eviction import BlockRecord
from kvcache.pool.storeconfig import StoreConfig
from kvcache.pool.tiers import Tiers
from tests.kvcache.pool.storage import ONE, block_of, key_of


def ram_of(blocks: int) -> Tiers:
    return Tiers(StoreConfig(ram_bytes=blocks * ONE))


def put(tiers: Tiers, block: PoolBlock, now: float) -> list[bytes] | None:
    """The keys of what had to go for a new block, or None if it was refused."""
    tiers.index.take_changes()
    taken = tiers.take([block], now)
    changes = tiers.index.take_changes()
    return [key for kind, keys in changes for key in keys if kind == "evicted"] if taken else None


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "pin", "drop"]), st.integers(0, 12), st.integers(1, 250), st.booleans()),
    max_size=80,
)


@given(steps=STEPS)
def test_capacity_and_pins_hold_and_nothing_gets_lost(steps: list[tuple[str, int, int, bool]]) -> None:
    tiers = ram_of(4)
    expected: dict[bytes, PoolBlock] = {}
    for now, (step, number, size, tenant) in enumerate(steps):
        tiers.pins.expire(float(now))
        key = key_of(number)
        block = block_of(number, size=size, namespace="tenant" if tenant else "default")
        if step == "put" and key in expected:
            tiers.promote(block, float(now))
        elif step == "put":
            gone = put(tiers, block, float(now))
            if gone is not None:
                expected[key] = block
            for one in gone or ():
                assert one not in tiers.pins
                del expected[one]
        elif step == "get":
            tiers.use([key])
        elif step == "pin" and key in tiers.ram:
            tiers.pins.pin(key, now + 5.0)
        elif step == "drop":
            tiers.drop(key)
            expected.pop(key, None)
        assert {record.key: record.block for record in tiers.ram} == expected
        assert all(tiers.location(key).block is block for key, block in expected.items())
        assert sum(map(stored_bytes, expected.values())) == tiers.ram.bytes <= tiers.ram.capacity


def test_a_block_that_is_here_already_stays_and_counts_as_used() -> None:
    tiers = ram_of(2)
    first = block_of(0)
    for block in (first, block_of(1)):
        assert put(tiers, block, 0.0) == []
    tiers.promote(block_of(0), 0.0)
    assert tiers.location(key_of(0)).block is first and tiers.ram.stat().blocks == 2
    assert put(tiers, block_of(2), 0.0) == [key_of(1)]


def test_a_pinned_block_stays_until_its_time_is_over() -> None:
    tiers = ram_of(2)
    for number in (0, 1):
        put(tiers, block_of(number), 0.0)
    tiers.pins.pin(key_of(0), 10.0)
    assert put(tiers, block_of(2), 1.0) == [key_of(1)]
    tiers.pins.pin(key_of(2), 10.0)
    assert put(tiers, block_of(3), 2.0) is None
    tiers.pins.expire(10.0)
    assert put(tiers, block_of(3), 10.0) == [key_of(0)]


def test_without_capacity_every_block_is_refused() -> None:
    tiers = Tiers(StoreConfig(disk_path=Path("pool"), disk_bytes=9 * ONE))
    assert put(tiers, block_of(0), 0.0) == []
    assert key_of(0) in tiers.waiting and key_of(0) not in tiers.ram


def test_age_counts_from_when_the_block_was_stored_not_from_when_it_came_up() -> None:
    tiers = Tiers(StoreConfig(ram_bytes=ONE, disk_path=Path("pool"), disk_bytes=9 * ONE))
    tiers.load(BlockRecord(key_of(0), "default", ONE, stored_at=2.0), 50.0)
    tiers.promote(block_of(0), 50.0)
    put(tiers, block_of(1), 62.0)
    stat = tiers.ram.stat()
    assert (stat.evictions, stat.eviction_age_seconds) == (1, 60.0)
    assert (stat.bytes, stat.capacity) == (ONE, ONE)
    assert stat.bytes_written == 2 * len(block_of(0).payload)
