"""One read of blocks, part by part, from memory or from files, cut into slabs. Every byte is verified on its way.

What a damaged block means for the tiers is decided by the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from kvcache.pool.block import PoolBlock, Slab, SlabPart
from kvcache.pool.disk import PartRange
from kvcache.pool.eviction import BlockRecord, TierCounters
from kvcache.pool.tiers import BlockLocation
from serving.errors import CorruptChunk
from serving.messages import Tier

SLAB_BYTES = 2 << 20  # of a slab at most, unless a single part has more: what a lent buffer holds
READ_AHEAD_BYTES = 8 << 20  # of all files of one read together: the first slab waits for so much
LEAST_READ_BYTES = 1 << 17  # of one file at a time

log = logging.getLogger("millrace.kvcache")


BlockPart = tuple[bytes, memoryview]
"""The digest and the bytes of one part, verified."""


class MemorySource:
    """A block in memory."""

    tier = Tier.RAM

    def __init__(self, block: PoolBlock):
        self.block = block

    def read(self, part: int) -> BlockPart | None:
        """None when the block has no such part. Raises CorruptChunk."""
        if part >= self.block.parts:
            return None
        data = self.block.part(part)
        self.block.verify_part(part, data)
        return self.block.digest(part), data


class FileSource:
    """A block on disk, read some parts ahead: `read(first, last, most bytes)` returns them verified.

    With `keep` it keeps what it read, so that the whole block can be promoted to RAM.
    """

    tier = Tier.DISK

    def __init__(
        self, record: BlockRecord, last: int, most: int, read: Callable[[int, int, int], PartRange], *, keep: bool
    ):
        self.record = record
        self._last = last
        self._most = most
        self._read = read
        self._keep = keep
        self._ranges: list[PartRange] = []

    def read(self, part: int) -> BlockPart | None:
        """None when the block has no such part. Raises CorruptChunk, and OSError when the file cannot be read now."""
        if not self._ranges or part >= self._ranges[-1].last:
            found = self._read(part, self._last, self._most)
            self._ranges = [*self._ranges, found] if self._keep else [found]
        found = self._ranges[-1]
        return (found.header.digest(part), found.part(part)) if part < found.last else None

    def take_whole(self) -> PoolBlock | None:
        """The block, once, when every part of it has been read and kept, and was of one and the same file."""
        first, latest = self._ranges[0], self._ranges[-1]
        header = first.header
        if not self._keep or first.first or latest.last < header.parts:
            return None
        ranges, self._ranges, self._keep = self._ranges, [latest], False
        if any(found.header != header for found in ranges):
            return None
        return PoolBlock(
            key=header.key,
            namespace=header.namespace,
            sizes=header.sizes,
            digests=header.digests,
            payload=b"".join(found.payload for found in ranges),
        )


class ReadBackend(Protocol):
    """What a Reader needs of the store (kvcache.pool.store.BlockStore)."""

    def read_file(self, record: BlockRecord, first: int, last: int, most: int) -> PartRange: ...

    def promote(self, block: PoolBlock) -> None:
        """All of a block has been read from disk, undamaged."""
        ...

    def drop_damaged_block(self, block: PoolBlock, why: CorruptChunk) -> BlockLocation:
        """The block in memory is damaged; where else it can be read."""
        ...

    def drop_damaged_file(self, record: BlockRecord, why: CorruptChunk) -> BlockLocation:
        """The file is damaged, or gone, as when the block has been evicted; where else the block can be read."""
        ...


class Reader:
    """One read of parts first..last (exclusive; 0: all) of some blocks; `locations` says where each is, in order.

    What is read whole from disk is offered for promotion, the first `keep_bytes` of it. `tallies` is what there is to
    count, by tier.
    """

    def __init__(
        self,
        backend: ReadBackend,
        locations: Sequence[BlockLocation],
        first: int,
        last: int,
        *,
        keep_bytes: int,
        clock: Callable[[], float],
    ):
        self.tallies = {Tier.RAM: TierCounters(), Tier.DISK: TierCounters()}
        self._backend = backend
        self._first = first
        self._last = last
        self._keep_bytes = keep_bytes
        self._clock = clock
        files = sum(location.block is None and location.record is not None for location in locations)
        self._most = max(LEAST_READ_BYTES, READ_AHEAD_BYTES // max(1, files))
        self._sources = [self._source(location, first) for location in locations]
        self._counted = [False] * len(locations)

    def slabs(self) -> Iterator[Slab]:
        """Part by part; a block that has no more, or cannot be read, is left out from then on."""
        part = self._first
        left = [index for index, source in enumerate(self._sources) if source is not None]
        while left and (not self._last or part < self._last):
            batch: list[SlabPart] = []
            size, indices, left = 0, left, []
            for index in indices:
                found = self._read(index, part)
                if found is None:
                    self._sources[index] = None
                    continue
                left.append(index)
                digest, data = found
                if batch and size + len(data) > SLAB_BYTES:
                    yield Slab.of(part, batch)
                    batch, size = [], 0
                batch.append((index, digest, data))
                size += len(data)
            if batch:
                yield Slab.of(part, batch)
            part += 1

    def _source(self, location: BlockLocation, first: int) -> MemorySource | FileSource | None:
        if location.block is not None:
            return MemorySource(location.block)
        if location.record is None:
            return None
        self._keep_bytes -= location.record.size
        read = partial(self._backend.read_file, location.record)
        return FileSource(location.record, self._last, self._most, read, keep=first == 0 and self._keep_bytes >= 0)

    def _read(self, index: int, part: int) -> BlockPart | None:
        """The next part of a block, from the first tier that has it undamaged."""
        while (source := self._sources[index]) is not None:
            started = self._clock()
            try:
                found = source.read(part)
            except CorruptChunk as error:
                self._sources[index] = self._source(self._dropped(source, error), part)
                continue
            except OSError as error:
                log.warning("a block of the KV pool cannot be read: %s", error)
                return None
            if found is not None:
                self._count(index, source, len(found[1]), self._clock() - started)
            return found
        return None

    def _count(self, index: int, source: MemorySource | FileSource, size: int, seconds: float) -> None:
        tally = self.tallies[source.tier]
        tally.hits += not self._counted[index]
        tally.bytes_read += size
        tally.read_seconds += seconds
        self._counted[index] = True
        if isinstance(source, FileSource) and (block := source.take_whole()) is not None:
            self._backend.promote(block)

    def _dropped(self, source: MemorySource | FileSource, why: CorruptChunk) -> BlockLocation:
        if isinstance(source, MemorySource):
            return self._backend.drop_damaged_block(source.block, why)
        return self._backend.drop_damaged_file(source.record, why)
