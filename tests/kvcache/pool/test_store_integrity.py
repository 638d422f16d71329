"""Damage in every tier of a store: found, counted, dropped, never served; another tier helps out if it can."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcache.pool.block import PoolBlock
from kvcache.pool.links import BlockSelection
from kvcache.pool.reading import LEAST_READ_BYTES
from kvcache.pool.store import BlockStore
from serving.messages import Tier
from tests.kvcache.pool.storage import (
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

Damage = Callable[[bytes, bytes], bytes]
DAMAGE: dict[str, Damage] = {
    "a flipped bit of the payload": lambda own, _: own[:-1] + bytes([own[-1] ^ 1]),
    "a flipped bit of the header": lambda own, _: own[:20] + bytes([own[20] ^ 64]) + own[21:],
    "a huge number of parts": lambda own, _: own[:12] + b"\xff\xff\xff\xff" + own[16:],
    "the end missing": lambda own, _: own[:-30],
    "nothing left": lambda _, __: b"",
    "zeros": lambda own, _: bytes(len(own)),
    "another key's file": lambda _, other: other,
    "another key's payload": lambda own, other: own[:-150] + other[-150:],
}


def damage_in_ram(store: BlockStore, block: PoolBlock, at: int = -1) -> None:
    """Flip a bit of the block where it lies in RAM."""
    record = store._tiers.ram.get(block.key)
    assert record is not None
    record.block = damaged(block, at)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_a_miss_that_is_counted_and_deleted(opened: Open, name: str) -> None:
    store = opened(0, 9)
    told = listened(store)
    blocks = [block_of(number) for number in range(3)]
    store.put(blocks)
    drained(store)
    own, other = (file_of(store, block).read_bytes() for block in blocks[:2])
    file_of(store, blocks[0]).write_bytes(DAMAGE[name](own, other))
    assert whole_ones(store, blocks) == [False, True, True]
    assert store.tier_stats()[Tier.DISK].corrupt == 1
    assert store.lookup([block.key for block in blocks]) == [False, True, True]
    assert not file_of(store, blocks[0]).exists()
    assert told[blocks[0].key] == "evicted"
    store.put(blocks)
    assert whole_ones(drained(store), blocks) == [True] * 3


def test_a_restart_over_damaged_files_serves_none_of_them(opened: Open) -> None:
    store = opened(0, 99)
    blocks = [block_of(number) for number in range(2 + len(DAMAGE))]
    store.put(blocks)
    drained(store)
    store.close()
    other = file_of(store, blocks[1]).read_bytes()
    for block, damage in zip(blocks[2:], DAMAGE.values(), strict=True):
        path = file_of(store, block)
        path.write_bytes(damage(path.read_bytes(), other))
    again = opened(99, 99)
    assert whole_ones(again, blocks) == [True, True] + [False] * len(DAMAGE)
    assert again.tier_stats()[Tier.DISK].corrupt == len(DAMAGE)
    assert again.verify() == (4, 0)


def test_a_bit_that_flips_in_ram_is_found_and_the_disk_helps_out(opened: Open) -> None:
    store = opened(9, 9)
    blocks = [block_of(number) for number in range(3)]
    store.put(blocks)
    drained(store)
    damage_in_ram(store, blocks[1], at=150)  # in its second part
    assert whole_ones(store, blocks) == [True] * 3
    stats = store.tier_stats()
    assert (stats[Tier.RAM].corrupt, stats[Tier.DISK].corrupt) == (1, 0)
    assert tiers_of(store)[blocks[1].key] == (Tier.DISK,)
    assert whole_ones(store, blocks) == [True] * 3  # and up it goes again
    assert tiers_of(store)[blocks[1].key] == (Tier.RAM, Tier.DISK)


def test_a_bit_that_flips_in_ram_alone_is_a_miss_from_there_on(opened: Open) -> None:
    store = opened(9, 0)
    told = listened(store)
    blocks = [block_of(number) for number in range(3)]
    store.put(blocks)
    assert store.lookup([key_of(1)], 60.0) == [True]
    damage_in_ram(store, blocks[1], at=150)
    found = parts_read(store, [block.key for block in blocks])
    assert [sorted(parts) for parts in found] == [[0, 1, 2], [0], [0, 1, 2]]
    assert store.lookup([key_of(1)]) == [False]
    assert store.tier_stats()[Tier.RAM].corrupt == 1 and told[key_of(1)] == "evicted"
    assert store.pinned == 0


def test_a_file_that_vanishes_while_it_is_read_ends_its_block(opened: Open) -> None:
    store = opened(0, 2000)
    big = block_of(0, parts=4, size=LEAST_READ_BYTES * 2 // 3)  # one part at a time
    many = [block_of(number) for number in range(1, 130)]
    store.put([big, *many])
    drained(store)
    slabs = store.read([big.key, *(block.key for block in many)], 0, 0)
    first = next(slabs)
    assert first.part == 0 and 0 in first.indices
    file_of(store, big).unlink()
    left = list(slabs)
    assert all(0 not in slab.indices for slab in left if slab.part > 0)
    assert sum(len(slab.indices) for slab in left if slab.part == 2) == len(many)
    assert store.lookup([big.key]) == [False]


def test_a_block_evicted_while_it_is_read_is_no_damage(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(0, 2000)
    big = block_of(0, parts=4, size=LEAST_READ_BYTES * 2 // 3)
    many = [block_of(number) for number in range(1, 130)]
    store.put([big, *many])
    drained(store)
    slabs = store.read([big.key, *(block.key for block in many)], 0, 0)
    next(slabs)
    assert store.evict(BlockSelection(keys=(big.key,))) == 1
    assert all(0 not in slab.indices for slab in slabs if slab.part > 0)
    assert store.tier_stats()[Tier.DISK].corrupt == 0 and caplog.records == []


def test_verify_finds_all_damage_in_every_tier(opened: Open) -> None:
    store = opened(40, 40)
    blocks = [block_of(number) for number in range(30)]
    store.put(blocks)
    drained(store)
    choose = random.Random(5)
    in_ram, on_disk = choose.sample(blocks, 10), choose.sample(blocks, 10)
    for block in in_ram:
        damage_in_ram(store, block, choose.randrange(len(block.payload)))
    for block in on_disk:
        path = file_of(store, block)
        content = bytearray(path.read_bytes())
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
    assert store.verify() == (60, 20)
    stats = store.tier_stats()
    assert (stats[Tier.RAM].corrupt, stats[Tier.DISK].corrupt) == (10, 10)
    lost = {block.key for block in in_ram} & {block.key for block in on_disk}
    assert set(store.keys()) == {block.key for block in blocks} - lost
    assert whole_ones(store, blocks) == [block.key not in lost for block in blocks]
    assert store.verify()[1] == 0


def test_a_block_damaged_while_it_waits_for_disk_is_not_served(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are its maker's: writing wrong bytes to a file does not make them right."""
    store = opened(0, 9)
    block = block_of(0)
    with store._lock:
        store._tiers.take([damaged(block)], 0.0)
        store._changed.notify_all()
    drained(store)
    assert whole_ones(store, [block]) == [False]
    assert store.tier_stats()[Tier.DISK].corrupt == 1
