"""Brings the prefix a sequence shares with others, anywhere, from the KV pool into the sequence's own blocks.

Called while the sequence waits to be prefilled. From the first whole layer on, a step may follow the layers through the
arrival's barrier. Whatever the pool does, the worst result is some lost time, bounded by `wait`, and a computed prefix.
Runs on the event loop; blocks move under the engine's lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from kvcache.blocks.manager import KVCacheManager
from kvcache.connector.block_io import part_bytes, write_part
from kvcache.connector.fetch_cost import FetchCost
from kvcache.memory.device import DeviceKV
from kvcache.memory.locations import KVLocations
from kvcache.pool.block import Slab
from serving.batch.layer_barrier import LayerBarrier
from serving.engine.sequence import SequenceState
from serving.errors import NoRoom

log = logging.getLogger(__name__)


class PoolReader(Protocol):
    """What is asked of the pool (kvcache.pool.client.PoolClient)."""

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> int: ...

    def get(
        self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
    ) -> AsyncGenerator[Slab, None]: ...


@dataclass(slots=True)
class PrefixStats:
    """Running totals: tokens asked of the pool, tokens brought, prompts that waited in vain, and why not fetched."""

    queries: int = 0
    hits: int = 0
    timeouts: int = 0
    not_worth: int = 0  # fetches that computing beats
    malformed: int = 0  # slabs whose blocks are not of this layout's size


class PrefixFetcher:
    """See the module. `wait`: seconds a prompt may wait for the pool in all; `always`: fetch whatever that takes.

    Prompts too long for the device get their oldest KV straight into host memory; these wait for all that is fetched.
    `found` is told, under the engine's lock, keys and True if the pool has them, False if it lacks them.
    `freed` is called, likewise, when blocks come free as a write outlasted its sequence: somebody may wait for them.
    """

    def __init__(
        self,
        reader: PoolReader,
        kv: KVCacheManager,
        locations: KVLocations,
        cost: FetchCost,
        *,
        wait: float,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
        found: Callable[[Sequence[bytes], bool], None] | None = None,
        freed: Callable[[], None] = lambda: None,
    ):
        self.reader = reader
        self.kv = kv
        self.device_kv = locations.device
        self.host = locations.host
        self.lock = locations.lock
        self.cost = cost
        self.wait = wait
        self.always = always
        self.clock = clock
        self.found = found
        self.freed = freed
        self.stats = PrefixStats()
        self.asking = 0  # prompts that wait for the pool's answer, and are in no queue yet

    async def bring(self, seq: SequenceState, begun: Callable[[], None] = lambda: None) -> None:
        """Fill the sequence's leading blocks with what the pool has beyond what is here already.

        `begun` is called when a first layer has come: from then on the sequence may be prefilled. When this returns
        nothing is on its way any more.
        """
        keys = self.kv.shareable_keys(seq)
        with self.lock:
            local = self.kv.known_blocks(seq)
        if len(keys) == local:
            return
        arrival: PrefixArrival | None = None
        try:
            async with asyncio.timeout(self.wait):
                wanted = await self._worth_fetching(seq, keys[local:])
                if wanted and (arrival := self._room(seq, local, wanted)) is not None:
                    first = await self.fetch(arrival, keys[arrival.first : arrival.last], begun)
                    if arrival.can_be_followed:
                        self.cost.waited(arrival.bytes, first + arrival.barrier.waited_seconds)
        except TimeoutError:
            if arrival is not None and arrival.complete:  # it was but the end of the stream that took so long
                return
            self.stats.timeouts += 1
            log.info("the KV pool took more than %g s; the rest of the prefix is computed", self.wait)
        finally:
            if arrival is not None:
                arrival.finish()

    async def _worth_fetching(self, seq: SequenceState, keys: Sequence[bytes]) -> int:
        """How many of these keys, the sequence's next ones, to fetch."""
        found = await self.lookup(keys)
        tokens, size = found * self.kv.block_size, found * sum(part_bytes(self.device_kv.kept_as(seq.kv_dtype)))
        if not found or self.always or self.cost.pays(tokens, size, followed=not self.kv.is_too_long(seq)):
            return found
        self.stats.not_worth += 1
        return 0

    async def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys the pool has; it keeps those for as long as a prompt may wait."""
        began = self.clock()
        self.stats.queries += len(keys) * self.kv.block_size
        self.asking += 1
        try:
            found = await self.reader.lookup(keys, self.wait)
        finally:
            self.asking -= 1
        if self.found is not None:
            with self.lock:
                self.found(keys[:found], True)
                self.found(keys[found:], False)
        self.cost.answered(self.clock() - began)
        return found

    def _room(self, seq: SequenceState, local: int, wanted: int) -> PrefixArrival | None:
        """Blocks of the sequence to fill: those after what the worker has itself. None where there is no room."""
        with self.lock:
            if seq.ended:
                return None
            try:
                self.kv.begin(seq)
            except NoRoom:
                return None
            first, last = seq.computed // self.kv.block_size, local + wanted
            if seq.offload is not None:  # the rest of it is computed on the device
                assert not seq.computed, "what the device has computed is not on the host"
                size = seq.offload.extent_blocks
                last = min(last // size, len(seq.offload.extents)) * size
            if first >= last:
                return None
            seq.incoming.arrival = arrival = PrefixArrival(self, seq, first, last, len(self.device_kv.specs))
            return arrival

    def memory_of(self, seq: SequenceState) -> DeviceKV:
        """Where the sequence's first blocks lie: on the host, if it is too long for the device."""
        device_kv = self.device_kv
        if seq.offload is not None:
            assert self.host is not None
            device_kv = self.host.blocks
        return device_kv.kept_as(seq.kv_dtype)

    async def fetch(
        self, arrival: PrefixArrival, keys: Sequence[bytes], begun: Callable[[], None] = lambda: None
    ) -> float:
        """Write what comes of these keys into the arrival's blocks, until no more does or its sequence ends.

        Seconds until the first layer had come, of all of them if it never did.
        """
        began, first = self.clock(), None
        device_kv = self.memory_of(arrival.seq)
        sizes = part_bytes(device_kv)
        async with aclosing(self.reader.get(keys, parts=len(sizes))) as slabs:
            async for slab in slabs:
                if arrival.seq.ended:  # its blocks may be another sequence's by now
                    return self.clock() - began
                if slab.part >= len(sizes) or any(size != sizes[slab.part] for size in slab.sizes):
                    self.stats.malformed += 1
                    continue
                await self._write(arrival, device_kv, slab)
                if arrival.seq.ended:
                    return self.clock() - began
                arrival.here(slab.part, slab.indices)
                arrival.bytes += len(slab.payload)
                if arrival.layers and arrival.can_be_followed:
                    first = self.clock() - began if first is None else first
                    begun()
        seconds = self.clock() - began
        self.cost.fetched(arrival.bytes, seconds)
        return seconds if first is None else first

    async def _write(self, arrival: PrefixArrival, device_kv: DeviceKV, slab: Slab) -> None:
        """Write a slab into its blocks: at once in host memory, else in a thread, the blocks being held meanwhile."""
        blocks = [arrival.block(index) for index in slab.indices]
        if device_kv.in_host_memory:
            write_part(device_kv, slab.part, blocks, slab.payload)
            return
        size = self.kv.block_size
        with self.lock:
            kept = self.kv.keep(arrival.seq, arrival.first * size, arrival.last * size)
        writing = asyncio.create_task(asyncio.to_thread(write_part, device_kv, slab.part, blocks, slab.payload))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():  # however often it is cancelled: others write to these blocks next
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([writing])
            raise
        finally:
            with self.lock:
                if self.kv.let_go(kept):
                    self.freed()


class PrefixArrival:
    """Blocks first..last (exclusive) of a sequence on their way: which parts of which have come.

    A step may run behind it (serving.engine.sequence.ArrivingKV). Once all has come the sequence is as any other;
    if not all does, the leading blocks that have come whole count as soon as no step runs behind.
    """

    def __init__(self, prefixes: PrefixFetcher, seq: SequenceState, first: int, last: int, parts: int):
        self.prefixes = prefixes
        self.seq = seq
        self.first = first
        self.last = last
        self.parts = parts
        self.layers = 0  # leading parts that all blocks have
        self.bytes = 0
        self.barrier = LayerBarrier(prefixes.clock)
        self._come: list[set[int]] = [set() for _ in range(last - first)]
        self._missing = [last - first] * parts
        self._followed = False  # by a step
        self._finished = False

    @property
    def can_be_followed(self) -> bool:
        """True if a step may begin behind it: not where KV goes straight to host memory."""
        return self.seq.offload is None

    def block(self, index: int) -> int:
        """The block of PrefixFetcher.memory_of that the arrival's block of this number lies in."""
        return self.seq.block(self.first + index)

    def here(self, part: int, indices: Sequence[int]) -> None:
        """This part of these blocks is written."""
        for index in indices:
            self._missing[part] -= part not in self._come[index]
            self._come[index].add(part)
        before = self.layers
        while self.layers < self.parts and not self._missing[self.layers]:
            self.layers += 1
        if self.complete:
            self.finish()  # before the barrier opens: a step that passes may end at any time
        if self.layers > before:
            self.barrier.open(self.layers)

    def finish(self) -> None:
        """All has come, or no more will. Safe to repeat."""
        with self.prefixes.lock:
            if self._finished:
                return
            self._finished = True
            if not self.complete:
                self.barrier.fail()
            if self.complete or not self._followed:
                self._count()

    def enter(self) -> None:
        self._followed = True
        self.barrier.begin()
        self.seq.computed = self.last * self.prefixes.kv.block_size

    def leave(self) -> None:
        self._followed = False
        self.seq.computed = self.first * self.prefixes.kv.block_size
        if self._finished:
            self._count()

    def _count(self) -> None:
        """The leading blocks that have come whole count as computed from now on."""
        seq, size = self.seq, self.prefixes.kv.block_size
        if seq.ended or not seq.blocks:
            return
        seq.incoming.arrival = None
        if self.whole:
            self.prefixes.kv.fetched(seq, self.first + self.whole)
            came = seq.computed - self.first * size
            seq.incoming.fetched += came
            self.prefixes.stats.hits += came

    @property
    def complete(self) -> bool:
        return self.layers == self.parts

    @property
    def whole(self) -> int:
        """How many leading blocks have every part."""
        for count, come in enumerate(self._come):
            if len(come) < self.parts:
                return count
        return len(self._come)
