"""Opens handoffs to decode workers by the lease's grant: the first transport on offer that this process has too."""

from __future__ import annotations

import asyncio
import logging

from kvcache.handoff.grpc_stream import GrpcHandoff
from kvcache.handoff.local import LocalHandoff, Receiver
from kvcache.transfer.choice import writers_for
from kvcache.transfer.lent_memory import RemoteWriter, TransferUnavailable
from serving.links import HandoffLink
from serving.messages import LeaseGrant
from serving.rpc import Caller

log = logging.getLogger(__name__)


class Dialer:
    """See the module. `local` maps in-process names to receivers, everything else is reached as host:port."""

    def __init__(
        self,
        local: dict[str, Receiver] | None = None,
        cluster_key: str | None = None,
        kv_transport: str = "grpc",
    ):
        self.local = local if local is not None else {}
        self.cluster_key = cluster_key
        self._carriers = writers_for(kv_transport)
        self._callers: dict[str, Caller] = {}

    async def prepare(self) -> None:
        """Start what takes a while, NIXL half a second, so that the first handoff need not wait for it."""
        for writers in self._carriers.values():
            await asyncio.to_thread(writers.prepare)

    def dial(self, grant: LeaseGrant) -> HandoffLink:
        receiver = self.local.get(grant.address)
        if receiver is not None:
            return LocalHandoff(receiver, grant.lease)
        caller = self._callers.get(grant.address)
        if caller is None:
            caller = self._callers[grant.address] = Caller(grant.address, self.cluster_key)
        return GrpcHandoff(caller, self._carrier(grant), grant.lease)

    def _carrier(self, grant: LeaseGrant) -> RemoteWriter | None:
        """The first on offer that is at hand here and leads there."""
        for offer in grant.transports:
            if offer.kind in self._carriers:
                try:
                    return self._carriers[offer.kind].writer(offer)
                except TransferUnavailable as error:
                    log.debug("KV does not go to %s over %s: %s", grant.address, offer.kind, error)
        return None

    async def close(self) -> None:
        for caller in self._callers.values():
            await caller.close()
        self._callers.clear()
        for writers in self._carriers.values():
            writers.close()
