"""Fetches a lease's prefix straight from the KV pool, while a prefill worker hands over only what follows it.

It asks, decides and fetches; whose the blocks are, and what still has to be handed over, is decided by the lease
(decode.leases). Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvcache.blocks.manager import KVCacheManager
from kvcache.connector.block_io import part_bytes
from kvcache.connector.fetch_cost import DirectCost
from kvcache.connector.prefix_fetch import PoolReader, PrefixArrival, PrefixFetcher
from kvcache.memory.locations import KVLocations
from serving.engine.sequence import SequenceState

log = logging.getLogger(__name__)

ANSWER_SECONDS = 0.1  # a pool that takes longer to say what it has is not the quicker way


class DirectFetcher(PrefixFetcher):
    """Finds and fetches prefixes of leases. `direct_cost` decides, unless `always` is set."""

    def __init__(
        self,
        reader: PoolReader,
        kv: KVCacheManager,
        locations: KVLocations,
        direct_cost: DirectCost,
        *,
        wait: float,
        always: bool = False,
        freed: Callable[[], None] = lambda: None,
    ):
        super().__init__(reader, kv, locations, direct_cost.fetch, wait=wait, always=always, freed=freed)
        self.direct_cost = direct_cost
        self.fallbacks = 0  # prefixes that did not come whole, or not in time
        self._fetching: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Fetches in progress."""
        return len(self._fetching)

    async def find(self, seq: SequenceState) -> PrefixArrival | None:
        """Blocks of the sequence, after those it shares already, that are worth fetching. Takes one round trip."""
        keys, first = self.kv.shareable_keys(seq), seq.computed // self.kv.block_size
        if seq.offload is not None or len(keys) <= first:
            return None
        if not self.always and not self.direct_cost.pays((len(keys) - first) * self._block_bytes):
            return None
        try:
            async with asyncio.timeout(self.wait if self.always else min(self.wait, ANSWER_SECONDS)):
                found = await self.lookup(keys[first:])
        except TimeoutError:
            self.direct_cost.failed()
            return None
        return PrefixArrival(self, seq, first, first + found, len(self.device_kv.specs)) if found else None

    def begin(self, arrival: PrefixArrival) -> DirectFetch:
        """Begin to bring what was found. Nothing is written once its sequence has ended, or the fetch is stopped."""
        keys = arrival.seq.prefix.keys[arrival.first : arrival.last]
        over = asyncio.Event()
        task = asyncio.create_task(self._bring(arrival, keys, over), name="direct-fetch")
        task.add_done_callback(lambda _: over.set())
        task.add_done_callback(self._fetching.discard)
        self._fetching.add(task)
        return DirectFetch(arrival, task, over)

    async def _bring(self, arrival: PrefixArrival, keys: Sequence[bytes], over: asyncio.Event) -> None:
        def came() -> None:
            if arrival.complete:  # though the end of the stream may take a while
                over.set()

        try:
            async with asyncio.timeout(self.wait):
                await self.fetch(arrival, keys, came)
        except TimeoutError:
            log.info("the KV pool took more than %g s; a prefill worker hands the rest over", self.wait)
        finally:
            arrival.finish()

    async def settle(self, fetch: DirectFetch) -> int:
        """How many of the sequence's tokens are there, when no more will come from the pool.

        All else is here by now: what has not come yet is waited for no longer than it pays to (DirectCost.patience).
        """
        arrival = fetch.arrival
        missing = (arrival.last - arrival.first - arrival.whole) * self._block_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self.always else self.direct_cost.patience(missing)):
                await fetch.over.wait()
        if not arrival.complete:
            fetch.stop()
            await asyncio.wait([fetch.task])
            self.fallbacks += 1
            self.direct_cost.failed()
        return (arrival.first + arrival.whole) * self.kv.block_size

    @property
    def _block_bytes(self) -> int:
        return sum(part_bytes(self.device_kv))


@dataclass(frozen=True, slots=True)
class DirectFetch:
    """A fetch on its way. `over` is set once all has come, or no more will."""

    arrival: PrefixArrival
    task: asyncio.Task[None]
    over: asyncio.Event

    def stop(self) -> None:
        """From now on nothing is written. Safe to repeat."""
        self.task.cancel()
