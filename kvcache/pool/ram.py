"""The RAM tier: blocks by their key, never more bytes of them than its shelf allows.

Pure: `now` is handed in, and blocks that have to go are handed back, so that somebody may write them to disk. Not
thread-safe; the store's lock guards it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from kvcache.pool.block import PoolBlock
from kvcache.pool.blockfile import stored_bytes
from kvcache.pool.shelf import Shelf


class RamTier:
    """A shelf and the blocks on it. One without capacity refuses every block."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf
        self._blocks: dict[bytes, PoolBlock] = {}

    def put(
        self, block: PoolBlock, *, stored_at: float, now: float, pinned: Container[bytes] = ()
    ) -> list[PoolBlock] | None:
        """Take a block in; the blocks that had to go for it, or None if there is no room. A block already here stays.

        `stored_at` is when the node got it, which may be earlier than `now` when it comes up from disk.
        """
        if block.key in self._blocks:
            self.shelf.touch(block.key)
            return []
        gone = self.shelf.admit(
            block.key, block.namespace, stored_bytes(block), stored_at=stored_at, now=now, pinned=pinned
        )
        if gone is None:
            return None
        self._blocks[block.key] = block
        self.shelf.counters.bytes_written += len(block.payload)
        return [self._blocks.pop(held.key) for held in gone]

    def get(self, key: bytes) -> PoolBlock | None:
        """The block, without counting it as a use: that is `shelf.touch`."""
        return self._blocks.get(key)

    def remove(self, key: bytes) -> PoolBlock | None:
        self.shelf.remove(key)
        return self._blocks.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[PoolBlock]:
        return iter(self._blocks.values())
