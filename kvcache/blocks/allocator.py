"""The block allocator: reference counts, the index of reusable blocks, and eviction in LRU order.

It decides which block ids belong to whom; it never touches their bytes. Pure; no torch, no clock, no locks.

A block is in exactly one of three places:

    free     no sequence refers to it, and none could: its content is meaningless
    cached   no sequence refers to it, but its key is known: a later sequence may take it, or eviction may
    held     one or more sequences refer to it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcache.blocks.events import KVEventLog
from serving.errors import NoRoom


class BlockAllocator:
    """`num_blocks` blocks of `block_size` tokens. With `caching` off, freed blocks are never matched again.

    `events` is told which keys can be matched, on the thread that uses the allocator.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True, events: KVEventLog | None = None):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"KV memory needs at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._events = events
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks an `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.num_blocks - self.available

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks holding the longest known prefix of the chain `keys`. Takes no reference."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these matched or held blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int, *, headroom: int = 0) -> list[int]:
        """Take `count` blocks with one reference each, evicting cached ones as needed.

        Raises NoRoom, taking none, where `headroom` blocks would not stay available.
        """
        if count + headroom > self.available:
            raise NoRoom(f"{count} KV blocks and {headroom} spare asked for, {self.available} available")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        key, self._key_of[block] = self._key_of[block], None
        assert key is not None, "a cached block has a key"
        del self._block_of[key]
        self.evictions += 1
        if self._events is not None:
            self._events.removed(key)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each. Given a whole block table, its tail becomes evictable before its head."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released more often than taken"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._key_of[block] is not None:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Say that this held block is full and holds the KV named by `key`. The first block of a key stays."""
        assert self._references[block] > 0, f"block {block} published while no sequence holds it"
        if self.caching and self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block
            if self._events is not None:
                self._events.stored(key)

    def check(self, tables: Iterable[Sequence[int]]) -> int:
        """How many references `tables` do not explain: 0 unless some leaked. Raises AssertionError if broken."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            places = (block in free) + (block in self._cached) + (self._references[block] > 0)
            assert places == 1, f"block {block} is in {places} places"
            assert counted[block] <= self._references[block], f"block {block} is used without a reference"
        named = [(key, block) for block, key in enumerate(self._key_of) if key is not None]
        assert len(named) == len(self._block_of) and dict(named) == self._block_of
        return sum(self._references) - sum(counted)
