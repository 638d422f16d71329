"""Ties leases (decode.leases) to fetches of their first KV from the pool (kvcache.connector.direct_fetch).

It starts, settles and stops a lease's fetch, on the event loop; it knows neither how KV travels nor what it costs.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack

from decode.leases import Lease, LeaseTable
from kvcache.connector.direct_fetch import DirectFetch, DirectFetcher
from serving.errors import StaleLease
from serving.messages import LeaseId
from serving.tracing import PhaseSpan, carried

log = logging.getLogger(__name__)


class DirectLeases:
    """The fetches of one worker's leases. Without a `fetcher` everything is handed over."""

    def __init__(
        self,
        table: LeaseTable,
        lock: AbstractContextManager[object],
        fetcher: DirectFetcher | None,
        worker: str = "",
    ):
        self.table = table
        self.lock = lock
        self.fetcher = fetcher
        self._worker = {"millrace.worker": worker}
        self._fetches: dict[str, DirectFetch] = {}  # by lease, of its present epoch

    @property
    def running(self) -> int:
        """Fetches in progress, those of ended leases included until they have stopped."""
        return self.fetcher.running if self.fetcher is not None else 0

    async def begin(self, fence: LeaseId) -> int:
        """A handoff to the lease begins: fetch what the pool has of it. Returns the first token to hand over.

        0 where nothing comes from the pool, also for a stale fence: that is refused with the first chunk.
        """
        lease = self._current(fence)
        if self.fetcher is None or lease is None:
            return 0
        with ExitStack() as over, carried((phase := self._phase(lease)).context):
            over.enter_context(phase)
            arrival = await self.fetcher.find(lease.seq)
            with self.lock:
                lease = self._current(fence)  # what was may be over: the pool has been asked meanwhile
                if arrival is None or lease is None:
                    return 0
                size = self.fetcher.kv.block_size
                if not lease.leave_to_pool(range(arrival.first * size, arrival.last * size)):
                    return 0
                self.fetcher.kv.settle(lease.seq)
                fetch = self._fetches[fence.lease] = self.fetcher.begin(arrival)
                over.pop_all()
                fetch.task.add_done_callback(lambda _: _ended(phase, fetch))
                return lease.pooled.stop

    def _phase(self, lease: Lease) -> PhaseSpan:
        """The span of asking the pool and of what comes from it."""
        return PhaseSpan("millrace.fetch", lease.seq.request.trace, {**self._worker, "millrace.fetched_tokens": 0})

    def _current(self, fence: LeaseId) -> Lease | None:
        try:
            return self.table.check(fence)
        except StaleLease:
            return None

    async def settle(self, fence: LeaseId) -> range:
        """All else has been handed over: wait a bounded time for the pool, and return the tokens it did not bring.

        Nothing comes from the pool afterwards. Raises StaleLease.
        """
        lease = self.table.check(fence)
        if self.fetcher is None or not lease.pooled or not lease.handed_over:
            return range(0)
        upto = await self.fetcher.settle(self._fetches[fence.lease])
        with self.lock:
            lease = self.table.check(fence)
            lacking = lease.settle_pool(upto)
        if lacking:
            log.info("the KV pool brought %d tokens too few for lease %s", len(lacking), fence.lease)
        return lacking

    def stop(self, lease_id: str) -> None:
        """The lease has ended, or begins anew. Safe to repeat."""
        fetch = self._fetches.pop(lease_id, None)
        if fetch is not None:
            fetch.stop()

    def handed_over(self, lease: Lease) -> None:
        """The lease decodes from now on: what its handoff took is what the pool is weighed against."""
        if self.fetcher is not None:
            self.fetcher.direct_cost.handed_over(lease.meter)


def _ended(phase: PhaseSpan, fetch: DirectFetch) -> None:
    """No more comes from the pool."""
    arrival = fetch.arrival
    phase.attributes["millrace.fetched_tokens"] = arrival.whole * arrival.prefixes.kv.block_size
    phase.end("cancelled" if fetch.task.cancelled() else "")
