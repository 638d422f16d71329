"""The block allocator: reference counts, the index of reusable blocks, and eviction in LRU order.

It decides which block ids belong to whom; it never touches their bytes. Pure; no torch, no clock, no locks.

A block is in exactly one of three places:

    free     no sequence refers to it, and none could: its content is meaningless
    cached   no sequence refers to it, but its key is known: a later sequence may take it, or eviction may
    held     one or more sequences refer to it

Blocks can be reserved for a sequence that needs them later: until it takes them they stay free or cached, but nobody
else gets so many that they would be wanting.

What is kept of a block is small, since a simulated cluster has millions: the order of eviction is a queue that blocks
join whenever they become cached, and where all but the last entry of a block are passed over.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvcache.blocks.events import KVEventLog
from serving.errors import NoRoom

MOST_ENTRIES = 2  # in the order of eviction, for each block: then those that are passed over are thrown away


@lru_cache(maxsize=8)
def _numbers(count: int) -> tuple[int, ...]:
    """The ids of so many blocks, high ones first: the same objects for all allocators."""
    return tuple(range(count - 1, -1, -1))


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
        self._free = list(_numbers(num_blocks))  # a stack: low ids first
        self._cached = 0  # blocks
        self.reserved = 0  # blocks, of those that are free or cached
        self._released: deque[int] = deque()  # those cached, least recently released first, and entries passed over
        self._entries = array("I", bytes(4 * num_blocks))  # of each block in there
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks an `allocate` could hand out now."""
        return len(self._free) + self._cached - self.reserved

    @property
    def held(self) -> int:
        """Blocks that are held or reserved."""
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

    def holds(self, key: bytes) -> bool:
        """True if a block of this key could be matched."""
        return key in self._block_of

    def cached_among(self, blocks: Iterable[int]) -> int:
        """How many of these matched or held blocks no sequence refers to."""
        return sum([not self._references[block] for block in blocks])

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these matched or held blocks."""
        for block in blocks:
            if self._references[block] == 0:
                assert self._key_of[block] is not None, f"block {block} acquired though it is free"
                self._cached -= 1
            self._references[block] += 1

    def allocate(self, count: int, *, headroom: int = 0) -> list[int]:
        """Take `count` blocks with one reference each, evicting cached ones as needed.

        Raises NoRoom, taking none, where `headroom` blocks would not stay available.
        """
        self._check_room(count, headroom)
        return self._take(count)

    def reserve(self, count: int, *, headroom: int = 0) -> None:
        """See that `count` blocks can be had later (`allocate_reserved`), evicting nothing yet. Raises NoRoom."""
        self._check_room(count, headroom)
        self.reserved += count

    def allocate_reserved(self, count: int) -> list[int]:
        """Take blocks that are reserved, as `allocate`."""
        self.cancel_reserved(count)
        return self._take(count)

    def cancel_reserved(self, count: int) -> None:
        """So many of the reserved blocks are not needed."""
        assert 0 <= count <= self.reserved, f"{count} blocks of {self.reserved} reserved ones"
        self.reserved -= count

    def _check_room(self, count: int, headroom: int) -> None:
        if count + headroom > self.available:
            raise NoRoom(f"{count} KV blocks and {headroom} spare asked for, {self.available} available")

    def _take(self, count: int) -> list[int]:
        free = self._free
        first = max(0, len(free) - count)
        blocks = free[: first - 1 : -1] if first else free[::-1]
        del free[first:]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        """The cached blocks that were released least recently, which are not cached any more."""
        released, entries, references, keys = self._released, self._entries, self._references, self._key_of
        evicted: list[int] = []
        while len(evicted) < count:
            block = released.popleft()
            entries[block] = left = entries[block] - 1
            if left or references[block]:
                continue
            key, keys[block] = keys[block], None
            assert key is not None, "a cached block has a key"
            del self._block_of[key]
            evicted.append(block)
            if self._events is not None:
                self._events.removed(key)
        self._cached -= count
        self.evictions += count
        return evicted

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each. Given a whole block table, its tail becomes evictable before its head."""
        references, keys, entries = self._references, self._key_of, self._entries
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            references[block] = left
            if left:
                continue
            if keys[block] is not None:
                self._cached += 1
                self._released.append(block)
                entries[block] += 1
            else:
                self._free.append(block)
        if len(self._released) > MOST_ENTRIES * self.num_blocks:
            self._pass_over()

    def _pass_over(self) -> None:
        """Forget the entries of blocks that have joined the queue again since, or are held."""
        entries, references = self._entries, self._references
        kept: deque[int] = deque()
        for block in self._released:
            entries[block] -= 1
            if not entries[block] and not references[block]:
                kept.append(block)
        for block in kept:
            entries[block] = 1
        self._released = kept

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
        cached = {block for block in self._released if not self._references[block]}
        assert len(cached) == self._cached, f"{len(cached)} blocks are cached, {self._cached} counted"
        assert 0 <= self.reserved <= len(free) + len(cached), (
            f"{self.reserved} blocks are reserved, which are not there"
        )
        for block in range(self.num_blocks):
            places = (block in free) + (block in cached) + (self._references[block] > 0)
            assert places == 1, f"block {block} is in {places} places"
            assert counted[block] <= self._references[block], f"block {block} is used without a reference"
        named = [(key, block) for block, key in enumerate(self._key_of) if key is not None]
        assert len(named) == len(self._block_of) and dict(named) == self._block_of
        return sum(self._references) - sum(counted)
