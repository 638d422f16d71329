"""Which cached block is evicted next: the one that has waited longest, where blocks found before may wait longer.

Pure. There are two kinds of cached blocks: those in which a later sequence has found its prefix, and those in which
none has yet. LRU keeps both for the same time; where every prompt ends in text of its own, what nobody asks for again
takes the place of what all share. So blocks that have been found are kept `longer` times as long as others, and what
is missed decides how many times that is. A block that is computed or fetched anew though it was here says that its
kind was evicted too soon: `longer` grows where it had been found, and shrinks where not. This is how ARC (Megiddo and
Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003) divides a cache, by ages instead of lengths.
Within a kind it is LRU, and between kinds too as long as `longer` is 1: at first, and where one kind is missed like the
other.

What is kept of a block is small, since a simulated cluster has millions: the order is two queues that blocks join
whenever they become cached, and where all but the last entry of a block are passed over; of evicted keys a sample.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from math import exp, log
from zlib import crc32

MOST_ENTRIES = 2  # in the queues, for each block: then those that are passed over are thrown away
MOST_LONGER = 64.0
SAMPLE = 8  # one in so many evicted keys is remembered,
REMEMBERED = 1.25  # from when it was cached until so many times as many blocks as there are have become cached
SENSITIVITY = 16  # `longer` changes by a factor of e or more where one in so many of all blocks is missed

UNFOUND, FOUND = 0, 1  # the kinds


class EvictionOrder:
    """The cached blocks among `num_blocks`: `len()` of them. Time is counted in blocks that have become cached."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.longer = 1.0  # times as long as others that blocks which have been found are kept
        self._kinds = bytearray(num_blocks)
        self._cached = bytearray(num_blocks)
        self._since = array("Q", bytes(8 * num_blocks))  # when it was last cached
        self._queues: tuple[deque[int], deque[int]] = (deque(), deque())  # by kind, the longest cached first
        self._entries = tuple(array("I", bytes(4 * num_blocks)) for _ in self._queues)  # of each block in there
        self._counts = [0, 0]  # cached blocks, by kind
        # Evicted keys by kind, since when cached: the first of a plain dict is found behind all that were deleted.
        self._gone: tuple[OrderedDict[bytes, int], OrderedDict[bytes, int]] = (OrderedDict(), OrderedDict())
        self._now = 0

    def __len__(self) -> int:
        return self._counts[UNFOUND] + self._counts[FOUND]

    def __iter__(self) -> Iterator[int]:
        """In no order."""
        return (block for block, cached in enumerate(self._cached) if cached)

    def add(self, blocks: Iterable[int], *, used: bool = True) -> None:
        """These become cached, one after the other. Those that were not `used` since take no time."""
        kinds, cached, since, queues, entries = self._kinds, self._cached, self._since, self._queues, self._entries
        counts, now, step = self._counts, self._now, int(used)
        for block in blocks:
            now += step
            kind = kinds[block]
            cached[block] = 1
            since[block] = now
            queues[kind].append(block)
            entries[kind][block] += 1
            counts[kind] += 1
        self._now = now
        for gone in self._gone:
            while gone and now - next(iter(gone.values())) > REMEMBERED * self.num_blocks:
                gone.popitem(last=False)
        if sum(map(len, queues)) > MOST_ENTRIES * self.num_blocks:
            self._pass_over()

    def remove(self, blocks: Iterable[int]) -> None:
        """These cached ones are held."""
        cached, kinds, counts = self._cached, self._kinds, self._counts
        for block in blocks:
            cached[block] = 0
            counts[kinds[block]] -= 1

    def found(self, blocks: Iterable[int]) -> None:
        """A sequence has found its prefix in these, which are held."""
        for block in blocks:
            self._kinds[block] = FOUND

    def missed(self, key: bytes) -> None:
        """A block of this key has come to be: if one was evicted not long ago, its kind is kept too short.

        To be said of each key before a block of it is added, so that none is both cached and remembered.
        """
        if crc32(key) % SAMPLE:
            return
        unfound, found = self._gone
        sizes = max(1, len(unfound)), max(1, len(found))
        step = SENSITIVITY * SAMPLE / self.num_blocks  # as in ARC, more for the kind that has less gone
        if unfound.pop(key, None) is not None:
            self._change(-step * max(1.0, sizes[FOUND] / sizes[UNFOUND]))
        elif found.pop(key, None) is not None:
            self._change(step * max(1.0, sizes[UNFOUND] / sizes[FOUND]))

    def _change(self, by: float) -> None:
        """Of the logarithm; by 1 at most, so that no single block decides."""
        self.longer = exp(min(max(log(self.longer) + min(max(by, -1.0), 1.0), 0.0), log(MOST_LONGER)))

    def evict(self, count: int, keys: Sequence[bytes | None]) -> list[int]:
        """So many blocks, which are not cached any more, nor found. `keys` has the key of each block."""
        assert count <= len(self), f"{count} blocks to evict of {len(self)} cached ones"
        now, longer, since, evicted = self._now, self.longer, self._since, list[int]()
        unfound, found = self._first(UNFOUND), self._first(FOUND)
        while len(evicted) < count:
            if unfound is not None and (found is None or (now - since[unfound]) * longer >= now - since[found]):
                evicted.append(self._evicted(UNFOUND, keys))
                unfound = self._first(UNFOUND)
            else:
                evicted.append(self._evicted(FOUND, keys))
                found = self._first(FOUND)
        return evicted

    def _first(self, kind: int) -> int | None:
        """The block of this kind that has been cached the longest, if there is one; entries before it are gone."""
        queue, entries, cached, kinds = self._queues[kind], self._entries[kind], self._cached, self._kinds
        while queue:
            block = queue[0]
            if entries[block] == 1 and cached[block] and kinds[block] == kind:
                return block
            queue.popleft()
            entries[block] -= 1
        return None

    def _evicted(self, kind: int, keys: Sequence[bytes | None]) -> int:
        """The first one of this kind, evicted."""
        block = self._queues[kind].popleft()
        self._entries[kind][block] = 0
        self._cached[block] = 0
        self._kinds[block] = UNFOUND
        self._counts[kind] -= 1
        key, since = keys[block], self._since[block]
        if key is not None and not crc32(key) % SAMPLE and self._now - since <= REMEMBERED * self.num_blocks:
            self._gone[kind][key] = since
        return block

    def _pass_over(self) -> None:
        """Forget the entries of blocks that have joined a queue again since, or are held."""
        cached, kinds = self._cached, self._kinds
        for kind, (queue, entries) in enumerate(zip(self._queues, self._entries, strict=True)):
            kept = list[int]()
            for block in queue:
                entries[block] -= 1
                if not entries[block] and cached[block] and kinds[block] == kind:
                    kept.append(block)
            queue.clear()
            queue.extend(kept)
            for block in kept:
                entries[block] = 1
