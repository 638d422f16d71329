"""Which leases get their first KV from the pool, and what of it they lack when all else has been handed over.

decode.leases keeps the ledger, kvcache.connector.direct_fetch fetches; this ties one to the other, on the event loop.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from decode.leases import Lease, LeaseTable
from kvcache.connector.direct_fetch import DirectFetch, DirectFetcher
from serving.errors import StaleLease
from serving.messages import LeaseId

log = logging.getLogger(__name__)


class DirectLeases:
    """The fetches of one worker's leases. Without `prefixes` everything is handed over."""

    def __init__(self, table: LeaseTable, lock: AbstractContextManager[object], prefixes: DirectFetcher | None):
        self.table = table
        self.lock = lock
        self.prefixes = prefixes
        self._fetches: dict[str, DirectFetch] = {}  # by lease, of its present epoch

    @property
    def running(self) -> int:
        """Fetches in progress, those of ended leases included until they have stopped."""
        return self.prefixes.running if self.prefixes is not None else 0

    async def begin(self, fence: LeaseId) -> int:
        """A handoff to the lease begins: see what the pool has, and fetch it. The first token to hand over.

        0 where nothing comes from the pool; whoever holds a stale fence hears so with the first chunk.
        """
        seq = self._filling(fence)
        if self.prefixes is None or seq is None:
            return 0
        arrival = await self.prefixes.find(seq.seq)
        with self.lock:
            lease = self._filling(fence)  # what was may be over: the pool has been asked meanwhile
            if arrival is None or lease is None:
                return 0
            size = self.prefixes.prefixes.kv.block_size
            if not lease.leave_to_pool(range(arrival.first * size, arrival.last * size)):
                return 0
            self._fetches[fence.lease] = self.prefixes.fetch(arrival)
            return lease.pooled.stop

    def _filling(self, fence: LeaseId) -> Lease | None:
        try:
            return self.table.check(fence)
        except StaleLease:
            return None

    async def settle(self, fence: LeaseId) -> range:
        """All has been handed over: wait for the pool, not for long, and say what is to be handed over after all.

        Nothing comes from the pool any more. Raises StaleLease.
        """
        lease = self.table.check(fence)
        if self.prefixes is None or not lease.pooled or not lease.handed_over:
            return range(0)
        upto = await self.prefixes.settle(self._fetches[fence.lease])
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
        if self.prefixes is not None:
            self.prefixes.pace.handed_over(lease.meter)
