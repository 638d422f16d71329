"""One node's blocks: RAM over disk, either of them optional, verified when they are stored and when they are read.

Blocking and thread-safe: one lock guards what is where, and no file is touched under it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile

from kvcache.pool.block import PoolBlock, Slab, verify_block
from kvcache.pool.block_index import NamespaceTotal
from kvcache.pool.disk import NAMESPACE, BlockFolder, PartRange
from kvcache.pool.disk_writer import DiskWriter
from kvcache.pool.eviction import BlockRecord
from kvcache.pool.links import BlockEntry, BlockSelection
from kvcache.pool.reading import Reader
from kvcache.pool.storeconfig import StoreConfig
from kvcache.pool.tiers import BlockLocation, Tiers
from serving.errors import CorruptChunk, Draining, InvalidRequest, Overloaded
from serving.messages import NamespaceStat, Tier, TierStat

FLUSH_SECONDS = 20.0  # that closing spends on writing to disk
MOST_PROMOTED_BYTES = 1 << 29  # by one read
WARN_SECONDS = 60.0  # between warnings of the same trouble
FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("millrace.kvcache")


class BlockStore:
    """All methods may be called from any thread, and block. Raises ValueError for a folder that cannot be used.

    `listeners` are called with ("stored", keys) and ("evicted", keys) in the order things happened, the latter when a
    key is in no tier any more; from any thread, and they must not call back.
    """

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] = time.monotonic):
        self.config = config
        self.listeners: list[Callable[[str, tuple[bytes, ...]], None]] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # something waits for disk, or a file has been removed
        self._tiers = Tiers(config)
        self._leaving: Counter[bytes] = Counter()  # whose files other threads than the writer's are removing
        self.lookups = self.found = 0  # keys
        self.stored = self.refused = 0  # blocks
        self._telling = threading.Lock()
        self._closed = False
        self._warned: dict[int | None, float] = {}  # when, by the system's number of the trouble
        self._folder: BlockFolder | None = None
        self._writer: DiskWriter | None = None
        if config.disk_path is not None:
            self._folder = self._loaded(BlockFolder(config.disk_path))
            self._writer = DiskWriter(
                self._changed,
                following=lambda: next(iter(self._tiers.waiting.values()), None),
                write=partial(self._write, self._folder),
                clock=clock,
            )

    def _loaded(self, folder: BlockFolder) -> BlockFolder:
        """Index the files that are in the folder, by name and length; they are verified when read."""
        now, epoch = self._clock(), time.time()
        for file in folder.scan():
            stored_at = now - max(0.0, epoch - file.written_at)
            for record in self._tiers.load(BlockRecord(file.key, file.namespace, max(1, file.bytes), stored_at), now):
                folder.remove(record.key, record.namespace)
        self._tiers.index.take_changes()  # nothing of it has come or gone since there were listeners
        return folder

    # ---- storing -----------------------------------------------------------------------------------------------

    def put(self, blocks: Sequence[PoolBlock]) -> int:
        """Store blocks, a chain's in its order; how many of them are here now. Those that were already count as used.

        When only some have room to wait for disk, the first ones are taken. Raises CorruptChunk or InvalidRequest, none
        taken, if one is wrong, Overloaded (`backlog_full`) if none has room, Draining once closed.
        """
        owned = {block.key: _owned(block) for block in self._verified(blocks)}
        with self._changes_told():
            if self._closed:
                raise Draining("the store is closed")
            now = self._now()
            fresh = [block for key, block in owned.items() if key not in self._tiers.index]
            self._tiers.use([key for key in owned if key in self._tiers.index])
            room = self._tiers.room
            self.refused += len(fresh[room:])
            if fresh and not room:
                raise Overloaded("too many blocks wait for disk", code="backlog_full", retry_after=1.0)
            taken = self._tiers.take(fresh[:room], now)
            self.stored += taken
            self.refused += len(fresh[:room]) - taken
        return len(blocks) - len(fresh) + taken

    def _verified(self, blocks: Sequence[PoolBlock]) -> Sequence[PoolBlock]:
        for block in blocks:
            try:
                verify_block(block)
                if not NAMESPACE.fullmatch(block.namespace):
                    raise InvalidRequest(f"{block.namespace[:80]!r} cannot name a namespace", param="namespace")
            except (CorruptChunk, InvalidRequest):
                with self._lock:
                    self.refused += len(blocks)
                raise
        return blocks

    def _write(self, folder: BlockFolder, block: PoolBlock, *, full: bool = False) -> None:
        """The writer's thread: one block from waiting to disk. Only here are files made.

        A disk that turns out to be full makes room once (`full`) and is tried again.
        """
        with self._changes_told():
            if self._tiers.waiting.get(block.key) is not block:
                return
            record, gone = self._tiers.place_on_disk(block, self._now(), full=full)
        for victim in gone:
            folder.remove(victim.key, victim.namespace)
        if record is None:
            return
        with self._changed:
            while self._leaving[block.key]:
                self._changed.wait()
        try:
            folder.write(block)
        except OSError as error:
            self._warn_of(error)
            if error.errno in FULL and not full:
                self._write(folder, block, full=True)
                return
            with self._changes_told():
                self._tiers.not_written(block, record)
            return
        with self._changes_told():
            wanted = self._tiers.written(block, record)
        if not wanted:
            folder.remove(block.key, block.namespace)

    def _warn_of(self, error: OSError) -> None:
        """The writer's thread: a block could not be written. Warn once in WARN_SECONDS."""
        now = self._clock()
        if now < self._warned.get(error.errno, float("-inf")) + WARN_SECONDS:
            return
        self._warned[error.errno] = now
        where, why = self.config.disk_path, error.strerror or error
        if error.errno in FULL:
            text = (
                "%s is full before it holds its %d bytes of blocks (%s): older ones make room for new ones there. Free "
            )
            log.warning(text + "space, or start the node with a smaller disk", where, self.config.disk_bytes, why)
        else:
            log.warning("blocks cannot be written to %s (%s): new ones are in memory alone until they can", where, why)

    # ---- reading -----------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        """Which keys are here, in any tier; those are pinned for so long."""
        with self._lock:
            until = self._now() + pin_seconds
            found = [key in self._tiers.index for key in keys]
            if pin_seconds > 0:
                for key, here in zip(keys, found, strict=True):
                    if here:
                        self._tiers.pins.pin(key, until)
            self.lookups += len(keys)
            self.found += sum(found)
        return found

    def read(self, keys: Sequence[bytes], first_part: int, last_part: int) -> Generator[Slab, None, None]:
        """Parts first_part..last_part (exclusive; 0: all) of a chain's blocks, part by part.

        Slabs are cut by reading.Reader. A key that is not here, or whose bytes are found wrong in every tier, is left
        out from then on.
        """
        with self._lock:
            locations = self._tiers.use(keys)
        keep_bytes = min(self.config.ram_bytes, MOST_PROMOTED_BYTES)
        reader = Reader(self, locations, first_part, last_part, keep_bytes=keep_bytes, clock=self._clock)
        try:
            yield from reader.slabs()
        finally:
            with self._lock:
                self._tiers.ram.counters.add(reader.tallies[Tier.RAM])
                self._tiers.disk.counters.add(reader.tallies[Tier.DISK])

    def verify(self, stopped: Callable[[], bool] = lambda: False) -> tuple[int, int]:
        """Read every copy in every tier: (copies read, copies found damaged and dropped), up to where it was stopped.

        A disk may take an hour, so it is asked before each copy whether to go on.
        """
        with self._lock:
            blocks = [record.block for record in self._tiers.ram]
            files = [record for record in self._tiers.disk if record.key not in self._tiers.waiting]
        copies = chain(
            (partial(self._damaged_block, block) for block in blocks),
            (partial(self._damaged_file, record) for record in files),
        )
        damaged = [is_damaged() for is_damaged in takewhile(lambda _: not stopped(), copies)]
        return len(damaged), sum(damaged)

    def _damaged_block(self, block: PoolBlock) -> bool:
        try:
            verify_block(block)
        except CorruptChunk as error:
            self.drop_damaged_block(block, error)
            return True
        return False

    def _damaged_file(self, record: BlockRecord) -> bool:
        try:
            self.read_file(record, 0, 0, record.size)
        except CorruptChunk as error:
            with self._lock:
                still_here = self._tiers.disk.get(record.key) is record
            self.drop_damaged_file(record, error)
            return still_here
        except OSError as error:
            log.warning("a block on disk cannot be read: %s", error)
        return False

    # ---- what a Reader needs (kvcache.pool.reading.ReadBackend) ------------------------------------------------------

    def read_file(self, record: BlockRecord, first: int, last: int, most: int) -> PartRange:
        assert self._folder is not None, "only a folder's files are in the disk tier"
        return self._folder.read(record.key, record.namespace, first, last, most)

    def promote(self, block: PoolBlock) -> None:
        with self._changes_told():
            self._tiers.promote(block, self._now())

    def drop_damaged_block(self, block: PoolBlock, why: CorruptChunk) -> BlockLocation:
        with self._changes_told():
            ours = self._tiers.drop_damaged_block(block)
            location = self._tiers.location(block.key)
        if ours:
            log.warning("a block of the KV pool was dropped from ram: %s", why)
        return location

    def drop_damaged_file(self, record: BlockRecord, why: CorruptChunk) -> BlockLocation:
        with self._changes_told():
            ours = self._tiers.drop_damaged_file(record)
            self._leaving.update([record.key] if ours else [])
            location = self._tiers.location(record.key)
        if ours:
            log.warning("a block of the KV pool was dropped from disk: %s", why)
            self._remove_files([record])
        return location

    # ---- administration ----------------------------------------------------------------------------------------

    def evict(self, what: BlockSelection) -> int:
        """Drop these blocks from every tier, pinned ones excepted; how many."""
        with self._changes_told():
            self._now()
            chosen = [record.key for record in self._tiers.index.select(what) if record.key not in self._tiers.pins]
            files = [record for key in chosen if (record := self._tiers.drop(key)) is not None]
            self._leaving.update(record.key for record in files)
        self._remove_files(files)
        return len(chosen)

    def _remove_files(self, files: Sequence[BlockRecord]) -> None:
        """Of blocks that are no longer in the tier, and that have been marked as leaving."""
        if self._folder is not None:
            for record in files:
                self._folder.remove(record.key, record.namespace)
        with self._changed:
            self._leaving -= Counter(record.key for record in files)
            self._changed.notify_all()

    def keys(self) -> list[bytes]:
        with self._lock:
            return self._tiers.index.keys()

    def entries(self, what: BlockSelection) -> list[BlockEntry]:
        with self._lock:
            return self._tiers.entries(self._tiers.index.select(what), self._now())

    def tier_stats(self) -> dict[Tier, TierStat]:
        """The tiers there are."""
        with self._lock:
            stats = {Tier.RAM: self._tiers.ram.stat(), Tier.DISK: self._tiers.disk.stat()}
            return {tier: stat for tier, stat in stats.items() if stat.capacity}

    def namespace_stats(self) -> dict[str, NamespaceStat]:
        """Namespaces that hold blocks or have a quota of their own; a block in two tiers counts once."""
        quotas = self.config.quotas
        with self._lock:
            totals = {**dict.fromkeys(quotas, NamespaceTotal()), **self._tiers.index.totals}
            return {
                name: NamespaceStat(
                    bytes=held.bytes, blocks=held.blocks, quota=quotas.get(name, self.config.default_quota)
                )
                for name, held in sorted(totals.items())
            }

    @property
    def pinned(self) -> int:
        with self._lock:
            self._now()
            return len(self._tiers.pins)

    @property
    def backlog(self) -> int:
        return len(self._tiers.waiting)

    def close(self) -> None:
        """Write what waits to disk, and with "back" what is in RAM alone, for up to FLUSH_SECONDS."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tiers.write_all()
        if self._writer is not None and self._folder is not None:
            self._writer.finish(FLUSH_SECONDS)
            if self.backlog:
                log.warning("%d blocks of the KV pool were not written to disk in time", self.backlog)
            self._folder.close()

    def _now(self) -> float:
        """Under the lock: the time, and no pin is left that ended before it."""
        now = self._clock()
        self._tiers.pins.expire(now)
        return now

    @contextmanager
    def _changes_told(self) -> Iterator[None]:
        """Hold the lock; when it is released, tell the writer, and the listeners what has come and gone."""
        with self._changed:
            yield
            self._changed.notify_all()
        with self._telling:
            with self._lock:
                changes = self._tiers.index.take_changes()
            for kind, keys in changes:
                for listener in tuple(self.listeners):
                    listener(kind, keys)


def _owned(block: PoolBlock) -> PoolBlock:
    """The block with bytes of its own: a view would keep the message alive that it came in, or change with it."""
    return block if isinstance(block.payload, bytes) else replace(block, payload=bytes(block.payload))
