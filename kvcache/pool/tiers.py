"""Which block is in which tier of a node (RAM, waiting for disk, disk), and which moves follow from an event.

Pure: `now` is handed in, and files are written, read and removed by the store. Not thread-safe; its lock guards this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvcache.pool.block import PoolBlock
from kvcache.pool.block_index import BlockIndex
from kvcache.pool.blockfile import stored_bytes
from kvcache.pool.eviction import BlockRecord, Pins, QuotaLru
from kvcache.pool.links import BlockEntry
from kvcache.pool.storeconfig import StoreConfig
from serving.messages import Tier

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Where a block can be read: in memory, else from its file; `record` is its place in the disk tier."""

    block: PoolBlock | None
    record: BlockRecord | None


@dataclass(slots=True)
class RamRecord(BlockRecord):
    """A block in RAM with its bytes."""

    block: PoolBlock = field(kw_only=True)


class Tiers:
    """RAM and disk; a tier that is not there has no capacity.

    A block has a place in the disk tier from when its file is about to be written, and it is in `waiting` until that
    has been done. The blocks of a chain are taken and used last first, so that no block is evicted before those that
    are useless without it.
    """

    def __init__(self, config: StoreConfig):
        self.config = config
        self.ram: QuotaLru[RamRecord] = config.lru(config.ram_bytes)
        self.disk: QuotaLru[BlockRecord] = config.lru(config.disk_bytes)
        self.waiting: dict[bytes, PoolBlock] = {}
        self.pins = Pins()
        self.index = BlockIndex()

    # ---- blocks that come --------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many blocks may come now. Where blocks end on disk, as many as may wait: each one sends one there."""
        return max(0, self.config.backlog - len(self.waiting)) if self.disk.capacity else UNLIMITED

    def take(self, blocks: Sequence[PoolBlock], now: float) -> int:
        """Take new blocks in, a chain's in their order; how many found a place."""
        return sum(self._take(block, now) for block in reversed(blocks))

    def _take(self, block: PoolBlock, now: float) -> bool:
        in_ram = self._into_ram(block, now, now)
        to_disk = bool(self.disk.capacity) and (self.config.write == "through" or not in_ram)
        if to_disk:
            self.waiting[block.key] = block
        if in_ram or to_disk:
            self.index.add(BlockRecord(block.key, block.namespace, stored_bytes(block), now))
        return in_ram or to_disk

    def load(self, file: BlockRecord, now: float) -> list[BlockRecord]:
        """A file that was there at the start: those that have no room now, itself perhaps."""
        gone = self.disk.admit(file, now)
        if gone is None:
            return [file]
        self.index.add(replace(file))
        for record in gone:
            self.index.remove(record.key)
        return gone

    def promote(self, block: PoolBlock, now: float) -> None:
        """Put a block that was read from disk into RAM, if it is still here and RAM's victims may wait for disk."""
        record = self.index.get(block.key)
        if record is not None and self.room:
            self._into_ram(block, record.stored_at, now)

    def _into_ram(self, block: PoolBlock, stored_at: float, now: float) -> bool:
        """True if it is there now. `stored_at` is when the node got it, earlier than `now` if it comes up from disk."""
        if block.key in self.ram:
            self.ram.touch(block.key)
            return True
        record = RamRecord(block.key, block.namespace, stored_bytes(block), stored_at, block=block)
        gone = self.ram.admit(record, now, self.pins)
        if gone is None:
            return False
        self.ram.counters.bytes_written += len(block.payload)
        for victim in gone:
            if self._goes_down(victim.key):
                self.waiting[victim.key] = victim.block
            self._settle(victim.key)
        return True

    def _goes_down(self, key: bytes) -> bool:
        """True if a block that leaves RAM has to be written. With "through" it has been, but its file may have been
        evicted since, or could not be made. Then it is written again, as long as others have room to wait."""
        return bool(self.disk.capacity) and key not in self.disk and (self.config.write == "back" or self.room > 0)

    # ---- the way to disk ---------------------------------------------------------------------------------------

    def place_on_disk(
        self, block: PoolBlock, now: float, *, full: bool = False
    ) -> tuple[BlockRecord | None, list[BlockRecord]]:
        """A waiting block's place in the disk tier (None: no room, it waits no more), and those whose files have to go.

        With `full` it had a place, but no room on the disk itself, which is smaller than configured: so others go.
        """
        known = self.index.get(block.key)
        assert known is not None, "what waits is indexed"
        if full:
            self.disk.remove(block.key)
        gone = self.disk.admit(replace(known), now, self.pins, self.disk.bytes if full else None)
        if gone is None:
            del self.waiting[block.key]
        for key in [block.key, *(record.key for record in gone or ())]:
            self._settle(key)
        return self.disk.get(block.key), gone or []

    def written(self, block: PoolBlock, record: BlockRecord) -> bool:
        """Its file is there. False if the block was dropped meanwhile: the file has to go again."""
        if self.disk.get(block.key) is not record or self.waiting.get(block.key) is not block:
            return False
        del self.waiting[block.key]
        self.disk.counters.bytes_written += record.size
        return True

    def not_written(self, block: PoolBlock, record: BlockRecord) -> None:
        """Its file could not be written: it stays where else it is."""
        if self.disk.get(block.key) is record:
            self.disk.remove(block.key)
        if self.waiting.get(block.key) is block:
            del self.waiting[block.key]
        self._settle(block.key)

    def write_all(self) -> None:
        """Everything that is in RAM alone has to go to disk now."""
        if self.disk.capacity:
            for record in self.ram:
                if record.key not in self.disk:
                    self.waiting[record.key] = record.block

    # ---- blocks that are asked for -----------------------------------------------------------------------------

    def use(self, keys: Sequence[bytes]) -> list[BlockLocation]:
        """Where each of a chain's blocks can be read; counts as a use of those that are here, in every tier."""
        for key in reversed(keys):
            self.ram.touch(key)
            self.disk.touch(key)
        return [self.location(key) for key in keys]

    def location(self, key: bytes) -> BlockLocation:
        return BlockLocation(self._in_ram(key) or self.waiting.get(key), self.disk.get(key))

    def _in_ram(self, key: bytes) -> PoolBlock | None:
        record = self.ram.get(key)
        return None if record is None else record.block

    def entries(self, chosen: Iterable[BlockRecord], now: float) -> list[BlockEntry]:
        return [
            BlockEntry(
                key=record.key,
                namespace=record.namespace,
                bytes=record.size,
                tiers=self._tiers_of(record.key),
                age_seconds=now - record.stored_at,
                pinned=record.key in self.pins,
            )
            for record in chosen
        ]

    def _tiers_of(self, key: bytes) -> tuple[Tier, ...]:
        in_memory = key in self.ram or key in self.waiting
        on_disk = key in self.disk and key not in self.waiting
        return tuple(tier for tier, here in ((Tier.RAM, in_memory), (Tier.DISK, on_disk)) if here)

    # ---- blocks that go ----------------------------------------------------------------------------------------

    def drop(self, key: bytes) -> BlockRecord | None:
        """Out of every tier; its place on disk, whose file has to go, if it had one."""
        self.ram.remove(key)
        self.waiting.pop(key, None)
        record = self.disk.remove(key)
        self._settle(key)
        return record

    def drop_damaged_block(self, block: PoolBlock) -> bool:
        """A block in memory is not what it should be; a file of it, written before, may still be. False if the block
        has been dropped anyway."""
        in_ram, waits = self._in_ram(block.key) is block, self.waiting.get(block.key) is block
        if in_ram:
            self.ram.remove(block.key)
        if waits:
            del self.waiting[block.key]
            self.disk.remove(block.key)  # that file holds the same bytes, or will
        self.ram.counters.corrupt += in_ram or waits
        self._settle(block.key)
        return in_ram or waits

    def drop_damaged_file(self, record: BlockRecord) -> bool:
        """A file is not what it should be. False if the block has been dropped anyway."""
        if self.disk.get(record.key) is not record:
            return False
        self.disk.remove(record.key)
        self.disk.counters.corrupt += 1
        self._settle(record.key)
        return True

    def _settle(self, key: bytes) -> None:
        """Forget a block that is nowhere any more."""
        gone = key not in self.ram and key not in self.waiting and key not in self.disk
        if gone and key in self.index:
            self.index.remove(key)
            self.pins.release(key)
