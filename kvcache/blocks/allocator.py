"""The block allocator: reference counts, the index of reusable blocks, and eviction.

It decides which block ids belong to whom; it never touches their bytes. Pure; no torch, no clock, no locks.

A block is in exactly one of three places:

    free     no sequence refers to it, and none could: its content is meaningless
    cached   no sequence refers to it, but its key is known: a later sequence may take it, or eviction may
    held     one or more sequences refer to it

Blocks can be reserved for a sequence that needs them later: until it takes them they stay free or cached, but nobody
else gets so many that they would be wanting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvcache.blocks.events import KVEventLog
from kvcache.blocks.eviction import EvictionOrder
from serving.errors import NoRoom


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
        self.reserved = 0  # blocks, of those that are free or cached
        self._cached = EvictionOrder(num_blocks)
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks an `allocate` could hand out now."""
        return len(self._free) + len(self._cached) - self.reserved

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
        references, cached = self._references, list[int]()
        for block in blocks:
            if references[block] == 0:
                assert self._key_of[block] is not None, f"block {block} acquired though it is free"
                cached.append(block)
            references[block] += 1
        self._cached.remove(cached)

    def found(self, matched: Iterable[int]) -> None:
        """Say that a sequence has found its prefix in these acquired blocks."""
        self._cached.found(matched)

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
        """Blocks that are not cached any more."""
        keys = self._key_of
        evicted = self._cached.evict(count, keys)
        for block in evicted:
            key, keys[block] = keys[block], None
            assert key is not None, "a cached block has a key"
            del self._block_of[key]
            if self._events is not None:
                self._events.removed(key)
        self.evictions += count
        return evicted

    def release(self, blocks: Sequence[int], *, used: bool = True) -> None:
        """Drop one reference from each. Given a whole block table, its tail becomes evictable before its head.

        Blocks that were acquired in vain have not been `used`: other blocks seem to have waited no longer for it.
        """
        references, keys, cached = self._references, self._key_of, list[int]()
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, f"block {block} released more often than taken"
            references[block] = left
            if left:
                continue
            (self._free if keys[block] is None else cached).append(block)
        self._cached.add(cached, used=used)

    def publish(self, block: int, key: bytes) -> None:
        """Say that this held block is full and holds the KV named by `key`. The first block of a key stays."""
        assert self._references[block] > 0, f"block {block} published while no sequence holds it"
        if self.caching and self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block
            self._cached.missed(key)
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
        cached = set(self._cached)
        assert len(cached) == len(self._cached), f"{len(cached)} blocks are cached, {len(self._cached)} counted"
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
