"""The block store: what goes where, what comes back from which tier, and what is told about it."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest

from kvcache.pool.block import PoolBlock, make_block
from kvcache.pool.disk import BlockFolder
from kvcache.pool.links import BlockSelection
from kvcache.pool.reading import LEAST_READ_BYTES, SLAB_BYTES
from serving.errors import CorruptChunk, InvalidRequest, Overloaded
from serving.messages import Tier
from tests.kvcache.pool.storage import (
    ONE,
    Gate,
    Open,
    block_of,
    damaged,
    drained,
    file_of,
    key_of,
    listened,
    opened,
    parts_read,
    tiers_of,
    whole_ones,
)

__all__ = ["opened"]  # a fixture


@pytest.mark.parametrize(("ram", "disk"), [(9, 0), (0, 9), (9, 9), (2, 9)])
def test_what_was_put_comes_back_from_whatever_tiers_there_are(opened: Open, ram: int, disk: int) -> None:
    store = opened(ram, disk)
    blocks = [block_of(number) for number in range(6)]
    assert store.put(blocks) == 6
    assert whole_ones(store, blocks) == [True] * 6
    assert store.lookup([block.key for block in blocks] + [key_of(99)]) == [True] * 6 + [False]
    assert (store.stored, store.lookups, store.found, store.refused) == (6, 7, 6, 0)
    assert set(store.tier_stats()) == {tier for tier, size in ((Tier.RAM, ram), (Tier.DISK, disk)) if size}
    assert set(store.keys()) == {block.key for block in blocks}


def test_slabs_are_part_by_part_and_of_a_bounded_size(opened: Open) -> None:
    store = opened(40_000, 0)
    blocks = [block_of(number, parts=2, size=SLAB_BYTES // 3) for number in range(4)]
    blocks.append(block_of(4, parts=2, size=2 * SLAB_BYTES))
    store.put(blocks)
    slabs = list(store.read([key_of(99), *(block.key for block in blocks)], 0, 0))
    assert [(slab.part, slab.indices) for slab in slabs] == [
        (0, (1, 2, 3)),
        (0, (4,)),
        (0, (5,)),
        (1, (1, 2)),  # last parts are a little longer: three of them are more than a slab
        (1, (3, 4)),
        (1, (5,)),
    ]
    assert all(len(slab.payload) == sum(slab.sizes) for slab in slabs)


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.DISK])
def test_some_parts_can_be_asked_for_and_blocks_may_have_fewer(opened: Open, tier: Tier) -> None:
    store = opened(50, 0) if tier is Tier.RAM else opened(0, 50)
    blocks = [block_of(0, parts=2), block_of(1, parts=5)]
    store.put(blocks)
    if tier is Tier.DISK:
        drained(store)
    keys = [block.key for block in blocks]
    found = parts_read(store, keys, 1, 4)
    assert [sorted(parts) for parts in found] == [[1], [1, 2, 3]]
    assert found[1][2] == blocks[1].part(2)
    assert [sorted(parts) for parts in parts_read(store, keys, 3)] == [[], [3, 4]]
    assert parts_read(store, keys, 7) == [{}, {}]


def test_the_same_key_may_be_asked_for_twice(opened: Open) -> None:
    store = opened(3, 0)
    store.put([block_of(0)])
    assert whole_ones(store, [block_of(0), block_of(0)]) == [True, True]


def test_a_bad_block_is_refused_and_so_are_those_that_came_with_it(opened: Open) -> None:
    store = opened(9, 9)
    with pytest.raises(CorruptChunk):
        store.put([block_of(0), damaged(block_of(1))])
    with pytest.raises(CorruptChunk):
        store.put([replace(block_of(0), key=b"short")])
    for name in ("", "..", "a/b", ".hidden", "x" * 65):
        with pytest.raises(InvalidRequest):
            store.put([block_of(0, namespace=name)])
    assert store.keys() == [] and store.refused == 8 and store.stored == 0


def test_a_block_that_is_here_is_not_stored_again_but_counts_as_used(opened: Open) -> None:
    store = opened(3, 0)
    store.put([block_of(0)])
    store.put([block_of(1), block_of(2)])
    assert store.put([block_of(0), block_of(0)]) == 2
    assert store.stored == 3
    store.put([block_of(3)])
    assert store.lookup([key_of(number) for number in range(4)]) == [True, True, False, True]


def test_the_end_of_a_chain_goes_before_its_beginning(opened: Open) -> None:
    store = opened(4, 0)
    chain = [block_of(number) for number in range(6)]
    store.put(chain)
    assert store.lookup([block.key for block in chain]) == [True] * 4 + [False] * 2
    whole_ones(store, chain[:4])
    store.put([block_of(10), block_of(11)])
    assert store.lookup([block.key for block in chain]) == [True] * 2 + [False] * 4


def test_a_view_is_copied_so_that_its_owner_may_change_it(opened: Open) -> None:
    store = opened(3, 0)
    block = block_of(0)
    buffer = bytearray(block.payload)
    store.put([replace(block, payload=memoryview(buffer))])
    buffer[:] = bytes(len(buffer))
    assert whole_ones(store, [block]) == [True]


# ---- RAM over disk -----------------------------------------------------------------------------------------------


def test_through_writes_everything_and_survives_a_restart(opened: Open) -> None:
    store = opened(2, 9)
    blocks = [block_of(number) for number in range(5)]
    store.put(blocks)
    store.close()
    again = opened(2, 9)
    assert set(again.keys()) == {block.key for block in blocks}
    assert again.verify() == (5, 0)
    assert whole_ones(again, blocks) == [True] * 5


def test_back_writes_what_ram_has_no_room_for_and_the_rest_at_the_end(opened: Open) -> None:
    store = opened(2, 9, write="back")
    for number in range(5):
        store.put([block_of(number)])
    drained(store)
    assert tiers_of(store) == {
        **{key_of(number): (Tier.DISK,) for number in range(3)},
        **{key_of(number): (Tier.RAM,) for number in (3, 4)},
    }
    store.close()
    again = opened(2, 9, write="back")
    assert whole_ones(again, [block_of(number) for number in range(5)]) == [True] * 5


def test_what_is_read_whole_from_disk_goes_up_to_ram(opened: Open) -> None:
    before = opened(0, 9)
    before.put([block_of(number) for number in range(3)])
    before.close()
    store = opened(9, 9)
    keys = [key_of(number) for number in range(3)]
    parts_read(store, keys, 0, 1)
    assert set(tiers_of(store).values()) == {(Tier.DISK,)}
    parts_read(store, keys)
    assert set(tiers_of(store).values()) == {(Tier.RAM, Tier.DISK)}
    hits = {tier: stat.hits for tier, stat in store.tier_stats().items()}
    assert hits == {Tier.RAM: 0, Tier.DISK: 6}
    assert whole_ones(store, [block_of(number) for number in range(3)]) == [True] * 3
    stats = store.tier_stats()
    assert stats[Tier.RAM].hits == 3
    assert stats[Tier.RAM].bytes_read == 3 * len(block_of(0).payload)


def test_one_read_promotes_no_more_than_ram_can_take(opened: Open) -> None:
    store = opened(2, 9)
    blocks = [block_of(number) for number in range(6)]
    store.put(blocks)
    drained(store)
    store.close()
    again = opened(2, 9)
    assert whole_ones(again, blocks) == [True] * 6
    assert {key for key, tiers in tiers_of(again).items() if Tier.RAM in tiers} == {key_of(0), key_of(1)}


def test_a_block_read_from_two_files_is_not_promoted(opened: Open) -> None:
    """Two makers' bytes for one key may differ; each part is good, but they are not one block."""
    store = opened(2000, 2000)
    size = LEAST_READ_BYTES * 2 // 3
    one = block_of(0, parts=3, size=size)
    other = make_block(one.key, "default", [block_of(9, parts=3, size=size).part(part) for part in range(3)])
    many = [block_of(number) for number in range(1, 130)]
    for block in (one, *many):
        store.put([block])
        drained(store)
    store.close()
    again = opened(2000, 2000)
    slabs = again.read([one.key, *(block.key for block in many)], 0, 0)
    next(slabs)
    file_of(again, one).unlink()
    assert again._folder is not None
    again._folder.write(other)
    for slab in slabs:
        for index, digest, data in slab.parts():
            if index == 0:
                assert data == other.part(slab.part) and digest == other.digest(slab.part)
    assert tiers_of(again)[one.key] == (Tier.DISK,)
    assert tiers_of(again)[key_of(1)] == (Tier.RAM, Tier.DISK)


def test_what_is_used_in_ram_is_not_stale_on_disk(opened: Open) -> None:
    store = opened(9, 3)
    store.put([block_of(0)])
    for number in range(1, 5):
        store.put([block_of(number)])
        drained(store)
        whole_ones(store, [block_of(0)])
    assert tiers_of(store)[key_of(0)] == (Tier.RAM, Tier.DISK)
    assert tiers_of(store)[key_of(2)] == (Tier.RAM,)


def test_promotion_in_back_mode_sends_what_it_pushes_out_to_disk(opened: Open) -> None:
    store = opened(2, 9, write="back")
    for number in range(4):
        store.put([block_of(number)])
    drained(store)
    assert whole_ones(store, [block_of(0), block_of(1)]) == [True, True]
    drained(store)
    assert whole_ones(store, [block_of(number) for number in range(4)]) == [True] * 4


def test_disk_gives_up_its_stalest_blocks_when_it_is_full(opened: Open) -> None:
    store = opened(0, 4)
    for number in range(6):
        store.put([block_of(number)])
        drained(store)
    assert store.lookup([key_of(number) for number in range(6)]) == [False] * 2 + [True] * 4
    store.close()
    root = store.config.disk_path
    assert root is not None
    assert sum(path.stat().st_size for path in (root / "blocks").rglob("*") if path.is_file()) <= 4 * ONE


def test_a_smaller_disk_after_a_restart_keeps_what_was_written_last(opened: Open) -> None:
    store = opened(0, 9)
    for number in range(6):
        store.put([block_of(number)])
        drained(store)
    store.close()
    again = opened(0, 2)
    assert set(again.keys()) == {key_of(4), key_of(5)}
    assert again.verify() == (2, 0)


def test_blocks_that_wait_for_disk_can_be_read(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = opened(0, 9)
    blocks = [block_of(number) for number in range(3)]
    store.put(blocks)
    assert store.backlog == 3
    assert whole_ones(store, blocks) == [True] * 3
    gate.open()
    assert drained(store).verify() == (3, 0)


def test_a_full_backlog_takes_the_first_blocks_and_then_none(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = opened(9, 9, backlog=3)
    chain = [block_of(number) for number in range(5)]
    assert store.put(chain) == 3
    assert store.lookup([block.key for block in chain]) == [True] * 3 + [False] * 2
    with pytest.raises(Overloaded) as caught:
        store.put(chain[3:])
    assert caught.value.code == "backlog_full" and caught.value.retry_after
    assert store.put(chain[:2]) == 2  # they are here already
    assert (store.stored, store.refused, store.backlog) == (3, 4, 3)
    gate.open()
    assert drained(store).put(chain) == 5


def test_a_block_evicted_while_it_is_written_does_not_come_back(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = opened(0, 9)
    block = block_of(0)
    store.put([block])
    assert gate.reached.acquire(timeout=30)
    assert store.evict(BlockSelection()) == 1
    assert store.lookup([block.key]) == [False]
    assert store.put([block]) == 1  # the very same object, while the first write still hangs
    gate.open()
    assert whole_ones(drained(store), [block]) == [True]


def test_a_block_evicted_while_it_is_written_leaves_no_file(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = opened(0, 9)
    store.put([block_of(0)])
    assert gate.reached.acquire(timeout=30)
    assert store.evict(BlockSelection()) == 1
    gate.open()
    store.close()
    assert opened(0, 9).keys() == []


@pytest.mark.parametrize("why", ["evicted", "damaged"])
def test_a_block_is_not_written_while_its_old_file_is_being_removed(
    opened: Open, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Else the removal, which has been decided long ago, would take the new file."""
    store = opened(0, 9)
    block = block_of(0)
    store.put([block])
    drained(store)
    remove, removing, may_remove = BlockFolder.remove, threading.Event(), threading.Event()

    def slow(folder: BlockFolder, key: bytes, namespace: str) -> None:
        removing.set()
        assert may_remove.wait(30)
        remove(folder, key, namespace)

    monkeypatch.setattr(BlockFolder, "remove", slow)
    if why == "damaged":
        file_of(store, block).write_bytes(b"")
    drop = threading.Thread(target=lambda: store.evict(BlockSelection()) if why == "evicted" else store.verify())
    drop.start()
    assert removing.wait(30)
    gate = Gate(monkeypatch)
    gate.open()
    store.put([block])
    assert not gate.reached.acquire(timeout=0.1)
    may_remove.set()
    drop.join()
    assert whole_ones(drained(store), [block]) == [True]


def test_closing_gives_up_when_the_disk_is_too_slow(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0, 1000)  # seconds pass in thousands
    gate = Gate(monkeypatch)
    store = opened(0, 9, clock=lambda: float(next(ticks)))
    store.put([block_of(number) for number in range(3)])
    assert gate.reached.acquire(timeout=30)
    closing = threading.Thread(target=store.close)
    closing.start()
    writer = store._writer
    assert writer is not None
    with store._changed:
        assert store._changed.wait_for(lambda: writer._ending, 30)
    gate.open()
    closing.join()
    assert store.backlog == 2
    assert opened(0, 9).verify() == (1, 0)


def test_a_disk_that_cannot_be_written_loses_the_block_and_goes_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = BlockFolder.write

    def failing(folder: BlockFolder, block: PoolBlock) -> None:
        if block.key == key_of(1):
            raise OSError("No space left on device")
        write(folder, block)

    monkeypatch.setattr(BlockFolder, "write", failing)
    store = opened(0, 9)
    told = listened(store)
    blocks = [block_of(number) for number in range(3)]
    store.put(blocks)
    drained(store)
    store.close()
    assert set(store.keys()) == {key_of(0), key_of(2)}
    assert told == {key_of(0): "stored", key_of(1): "evicted", key_of(2): "stored"}
