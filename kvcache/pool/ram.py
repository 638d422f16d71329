"""The RAM tier: blocks by their key, within a capacity.

Pure: `now` is handed in, and evicted blocks are returned, so that they can be written to disk. Not thread-safe; the
store's lock guards it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from kvcache.pool.block import PoolBlock
from kvcache.pool.blockfile import stored_bytes
from kvcache.pool.eviction import BlockRecord, QuotaLru


class RamTier:
    """Blocks, and the LRU that counts them. Without capacity it refuses every block."""

    def __init__(self, lru: QuotaLru):
        self.lru = lru
        self._blocks: dict[bytes, PoolBlock] = {}

    def put(
        self, block: PoolBlock, *, stored_at: float, now: float, pinned: Container[bytes] = ()
    ) -> list[PoolBlock] | None:
        """Take a block in; the blocks that had to go for it, or None if there is no room. A block already here stays.

        `stored_at` is when the node got it, which may be earlier than `now` when it comes up from disk.
        """
        if block.key in self._blocks:
            self.lru.touch(block.key)
            return []
        gone = self.lru.admit(BlockRecord(block.key, block.namespace, stored_bytes(block), stored_at), now, pinned)
        if gone is None:
            return None
        self._blocks[block.key] = block
        self.lru.counters.bytes_written += len(block.payload)
        return [self._blocks.pop(record.key) for record in gone]

    def get(self, key: bytes) -> PoolBlock | None:
        """The block, without counting it as a use: that is `lru.touch`."""
        return self._blocks.get(key)

    def remove(self, key: bytes) -> PoolBlock | None:
        self.lru.remove(key)
        return self._blocks.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[PoolBlock]:
        return iter(self._blocks.values())
