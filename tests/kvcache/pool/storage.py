"""Blocks to store, stores to put them in, and what a store gives back for them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvcache.pool.block import PoolBlock, make_block, part_digest
from kvcache.pool.blockfile import stored_bytes
from kvcache.pool.disk import BlockFolder
from kvcache.pool.links import BlockSelection
from kvcache.pool.store import BlockStore
from kvcache.pool.storeconfig import StoreConfig
from serving.messages import Tier

Open = Callable[..., BlockStore]


def key_of(number: int) -> bytes:
    return sha256(b"block %d" % number).digest()


def block_of(number: int, *, parts: int = 3, size: int = 100, namespace: str = "default") -> PoolBlock:
    """The block of that number, its bytes following from it; the last part is a little longer than the others."""
    contents = random.Random(number)
    sizes = [size] * (parts - 1) + [size + 7]
    return make_block(key_of(number), namespace, [contents.randbytes(one) for one in sizes])


def damaged(block: PoolBlock, at: int = -1) -> PoolBlock:
    """The block with a bit of its payload flipped, its digests as they were."""
    payload = bytearray(block.payload)
    payload[at] ^= 4
    return PoolBlock(
        key=block.key, namespace=block.namespace, sizes=block.sizes, digests=block.digests, payload=bytes(payload)
    )


def parts_read(store: BlockStore, keys: Sequence[bytes], first: int = 0, last: int = 0) -> list[dict[int, bytes]]:
    """For each key the parts that came, by number; every piece's digest is checked, and each comes once."""
    found: list[dict[int, bytes]] = [{} for _ in keys]
    latest = first
    for slab in store.read(keys, first, last):
        assert slab.part >= latest and list(slab.indices) == sorted(slab.indices)
        latest = slab.part
        for index, digest, data in slab.parts():
            assert slab.part not in found[index]
            found[index][slab.part] = bytes(data)
            assert len(digest) == 16
    return found


def is_whole(block: PoolBlock, parts: dict[int, bytes]) -> bool:
    """Whether these are all parts of the block, every one as it was made."""
    return sorted(parts) == list(range(block.parts)) and all(
        part_digest(block.key, part, block.parts, data) == block.digest(part) for part, data in parts.items()
    )


def whole_ones(store: BlockStore, blocks: Sequence[PoolBlock]) -> list[bool]:
    """Which of the blocks the store gives back whole. What it gives of the others is nothing wrong, but not all."""
    found = parts_read(store, [block.key for block in blocks])
    for block, parts in zip(blocks, found, strict=True):
        for part, data in parts.items():
            assert part_digest(block.key, part, block.parts, data) == block.digest(part), "a wrong byte was served"
    return [is_whole(block, parts) for block, parts in zip(blocks, found, strict=True)]


ONE = stored_bytes(block_of(0))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens stores by the number of blocks each tier holds; `disk=0` for RAM alone. All are closed at the end."""
    stores: list[BlockStore] = []

    def open_store(ram: int, disk: int, *, clock: Callable[[], float] = lambda: 0.0, **options: Any) -> BlockStore:
        folder = tmp_path / "pool" if disk else None
        config = StoreConfig(ram_bytes=ram * ONE, disk_path=folder, disk_bytes=disk * ONE, **options)
        stores.append(BlockStore(config, clock=clock))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


class Gate:
    """Holds up writing to disk until it is opened, and tells when a write has come to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Semaphore(0)
        self._open = threading.Event()
        write = BlockFolder.write

        def gated(folder: BlockFolder, block: PoolBlock) -> None:
            self.reached.release()
            assert self._open.wait(30)
            write(folder, block)

        monkeypatch.setattr(BlockFolder, "write", gated)

    def open(self) -> None:
        self._open.set()


def tiers_of(store: BlockStore) -> dict[bytes, tuple[Tier, ...]]:
    return {entry.key: entry.tiers for entry in store.entries(BlockSelection())}


def drained(store: BlockStore) -> BlockStore:
    """The same store once nothing waits for disk."""
    with store._changed:
        assert store._changed.wait_for(lambda: not store.backlog, 30)
    return store


def listened(store: BlockStore) -> dict[bytes, str]:
    """What a listener last heard of each key."""
    told: dict[bytes, str] = {}
    store.listeners.append(lambda kind, keys: told.update(dict.fromkeys(keys, kind)))
    return told


def file_of(store: BlockStore, block: PoolBlock) -> Path:
    """Where the block's file is, or would be."""
    assert store._folder is not None
    return store._folder._path(block.key, block.namespace)
