"""Many threads at one store: what they read is never wrong, and when they have gone everything still adds up."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcache.pool.links import BlockSelection
from kvcache.pool.store import BlockStore
from serving.errors import Overloaded
from serving.messages import Tier
from tests.kvcache.pool.storage import Open, block_of, drained, listened, opened, whole_ones

__all__ = ["opened"]  # a fixture

BLOCKS = [block_of(number, namespace=("a", "b", "c")[number % 3]) for number in range(40)]


def use(store: BlockStore, seed: int, start: threading.Barrier) -> int:
    """A few hundred random calls; how many blocks came back whole."""
    choose = random.Random(seed)
    start.wait(30)
    whole = 0
    for _ in range(120):
        first = choose.randrange(len(BLOCKS))
        chain = BLOCKS[first : first + choose.randint(1, 6)]
        step = choose.random()
        if step < 0.5:
            try:
                store.put(chain)
            except Overloaded:
                continue
        elif step < 0.85:
            whole += sum(whole_ones(store, chain))
        elif step < 0.95:
            store.lookup([block.key for block in chain], choose.choice([0.0, 1e-4]))
        else:
            store.evict(BlockSelection(keys=tuple(block.key for block in chain)))
    return whole


@pytest.mark.parametrize("write", ["through", "back"])
def test_threads_read_nothing_wrong_and_leave_a_consistent_store(opened: Open, write: str) -> None:
    store = opened(8, 16, write=write, backlog=6, quotas={"a": 1200}, clock=time.monotonic)
    told = listened(store)
    start = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        whole = sum(threads.map(use, [store] * 4, range(4), [start] * 4))
    assert whole > 0
    drained(store)
    stats = store.tier_stats()
    assert all(stat.bytes <= stat.capacity and stat.corrupt == 0 for stat in stats.values())
    assert {key for key, kind in told.items() if kind == "stored"} == set(store.keys())
    entries = store.entries(BlockSelection())
    assert {entry.key for entry in entries if Tier.RAM in entry.tiers} == {record.key for record in store._tiers.ram}
    assert sum(entry.bytes for entry in entries) == sum(stat.bytes for stat in store.namespace_stats().values())
    read, bad = store.verify()
    assert (read, bad) == (sum(stat.blocks for stat in stats.values()), 0)
    root = store.config.disk_path
    assert root is not None
    files = {bytes.fromhex(path.name) for path in (root / "blocks").rglob("*") if path.is_file()}
    assert files == {entry.key for entry in entries if Tier.DISK in entry.tiers}
    assert not store._leaving
