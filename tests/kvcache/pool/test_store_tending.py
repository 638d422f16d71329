"""What a block store keeps for whom, drops on demand, counts, and tells its listeners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache.pool.links import BlockSelection
from kvcache.pool.storeconfig import StoreConfig
from serving.errors import Draining
from serving.messages import NamespaceStat, Tier
from tests.kvcache.pool.storage import (
    ONE,
    Open,
    block_of,
    drained,
    key_of,
    listened,
    opened,
    parts_read,
    tiers_of,
    whole_ones,
)

__all__ = ["opened"]  # a fixture


class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("ram", "disk"), [(4, 0), (0, 4)])
def test_a_pin_keeps_a_block_for_its_time(opened: Open, ram: int, disk: int) -> None:
    clock = Time()
    store = opened(ram, disk, clock=clock)
    store.put([block_of(number) for number in range(4)])
    drained(store)
    assert store.lookup([key_of(3), key_of(99)], 10.0) == [True, False]
    assert store.pinned == 1
    for number in range(10, 20):
        store.put([block_of(number)])
    drained(store)
    assert store.lookup([key_of(3)]) == [True]
    assert store.evict(BlockSelection(keys=(key_of(3),))) == 0
    clock.now += 10.0
    assert store.pinned == 0
    for number in range(20, 30):
        store.put([block_of(number)])
    drained(store)
    assert store.lookup([key_of(3)]) == [False]


def test_evict_drops_what_is_meant_from_every_tier(opened: Open) -> None:
    store = opened(2, 9)
    blocks = [block_of(number, namespace="ab"[number % 2]) for number in range(6)]
    store.put(blocks)
    drained(store)
    assert store.evict(BlockSelection(namespace="a", keys=(key_of(0), key_of(1), key_of(99)))) == 1
    assert store.evict(BlockSelection(keys=(key_of(1),))) == 1
    assert store.evict(BlockSelection(namespace="a")) == 2
    assert set(store.keys()) == {key_of(3), key_of(5)}
    assert whole_ones(store, blocks) == [False, False, False, True, False, True]
    assert store.evict(BlockSelection()) == 2
    root = store.config.disk_path
    assert root is not None
    assert not any(path.is_file() for path in (root / "blocks").rglob("*"))
    assert all(stat.bytes == stat.blocks == 0 for stat in store.tier_stats().values())
    assert store.namespace_stats() == {}


def test_entries_show_where_blocks_are_and_how_old(opened: Open) -> None:
    clock = Time()
    store = opened(1, 9, clock=clock)
    store.put([block_of(0)])
    clock.now += 5.0
    store.put([block_of(1, namespace="b")])
    drained(store)
    store.lookup([key_of(0)], 60.0)
    shown = {entry.key: entry for entry in store.entries(BlockSelection())}
    assert (shown[key_of(0)].age_seconds, shown[key_of(0)].pinned, shown[key_of(0)].tiers) == (5.0, True, (Tier.DISK,))
    other = shown[key_of(1)]
    assert (other.age_seconds, other.pinned, other.tiers) == (0.0, False, (Tier.RAM, Tier.DISK))
    assert other.bytes == ONE - len("default") + len("b")
    assert [entry.key for entry in store.entries(BlockSelection(namespace="b"))] == [key_of(1)]


def test_age_outlives_a_restart(opened: Open) -> None:
    store = opened(0, 9)
    store.put([block_of(0)])
    store.close()
    clock = Time()
    again = opened(0, 9, clock=clock)
    clock.now += 7.0
    (entry,) = again.entries(BlockSelection())
    assert 7.0 <= entry.age_seconds < 7.0 + 600


def test_listeners_hear_what_came_and_what_is_nowhere_any_more(opened: Open) -> None:
    store = opened(2, 3)
    told = listened(store)
    for number in range(5):
        store.put([block_of(number)])
        drained(store)
    assert {key for key, kind in told.items() if kind == "stored"} == set(store.keys())
    assert told[key_of(0)] == told[key_of(1)] == "evicted"
    store.evict(BlockSelection(keys=(key_of(4),)))
    assert told[key_of(4)] == "evicted"


def test_a_block_that_leaves_ram_but_not_the_disk_is_no_news(opened: Open) -> None:
    store = opened(1, 9)
    told = listened(store)
    for number in range(3):
        store.put([block_of(number)])
        drained(store)
    assert set(told.values()) == {"stored"} and len(tiers_of(store)) == 3


@pytest.mark.parametrize(("ram", "disk"), [(10, 0), (0, 10), (4, 10)])
def test_a_flooding_tenant_cannot_push_another_below_its_quota(opened: Open, ram: int, disk: int) -> None:
    store = opened(ram, disk, quotas={"small": 3 * ONE}, write="through")
    mine = [block_of(number, namespace="small") for number in range(6)]
    store.put(mine)
    drained(store)
    for number in range(100, 140):
        store.put([block_of(number, namespace="flood")])
        drained(store)
    kept = [block for block in mine if store.lookup([block.key]) == [True]]
    stats = store.namespace_stats()
    assert stats["small"].blocks == len(kept) >= 3
    assert stats["small"].quota == 3 * ONE and stats["flood"].quota == 0
    assert whole_ones(store, kept) == [True] * len(kept)
    assert stats["small"].blocks + stats["flood"].blocks == 10


def test_namespaces_are_counted_once_however_many_tiers_hold_them(opened: Open) -> None:
    store = opened(9, 9, quotas={"idle": 5}, default_quota=7)
    store.put([block_of(0), block_of(1)])
    drained(store)
    assert store.namespace_stats() == {
        "default": NamespaceStat(bytes=2 * ONE, blocks=2, quota=7),
        "idle": NamespaceStat(bytes=0, blocks=0, quota=5),
    }


def test_statistics_by_tier(opened: Open) -> None:
    clock = Time()
    store = opened(2, 3, clock=clock)
    for number in range(4):
        store.put([block_of(number)])
        drained(store)
        clock.now += 1.0
    parts_read(store, [key_of(3), key_of(0)], 0, 2)
    stats = store.tier_stats()
    ram, disk = stats[Tier.RAM], stats[Tier.DISK]
    assert (ram.capacity, ram.bytes, ram.blocks, ram.hits) == (2 * ONE, 2 * ONE, 2, 1)
    assert (disk.capacity, disk.bytes, disk.blocks, disk.hits) == (3 * ONE, 3 * ONE, 3, 0)
    assert ram.bytes_read == 200 and disk.bytes_written == 4 * ONE
    assert (ram.evictions, ram.eviction_age_seconds) == (2, 2.0 + 2.0)
    assert (disk.evictions, disk.eviction_age_seconds) == (1, 3.0)


def test_a_closed_store_takes_nothing_and_closes_twice(opened: Open) -> None:
    store = opened(2, 2)
    store.close()
    store.close()
    with pytest.raises(Draining):
        store.put([block_of(0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs RAM or a disk"),
        ({"ram_bytes": -1}, "must not be negative"),
        ({"disk_path": Path("x")}, "both a folder and a size"),
        ({"disk_bytes": 5}, "both a folder and a size"),
        ({"ram_bytes": 5, "write": "around"}, "'around'"),
        ({"ram_bytes": 5, "backlog": 0}, "at least one block"),
        ({"ram_bytes": 5, "quotas": {"a": 3, "b": 3}}, "add up to 6 bytes, more than the 5"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreConfig(**options)
