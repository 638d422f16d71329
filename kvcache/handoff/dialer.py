"""Opens handoffs to decode workers by the lease's grant: the first transport on offer that this process has too."""

from __future__ import annotations

import asyncio

from kvcache.handoff.grpc_stream import GrpcHandoff
from kvcache.handoff.local import LocalHandoff, Receiver
from kvcache.transfer.choice import writers_for
from kvcache.transfer.remote_write import writer_to
from serving.links import HandoffLink
from serving.messages import LeaseGrant
from serving.rpc import Caller


class Dialer:
    """`local` maps in-process names to receivers; every other address is host:port."""

    def __init__(
        self,
        local: dict[str, Receiver] | None = None,
        cluster_key: str | None = None,
        kv_transport: str = "grpc",
    ):
        self.local = local if local is not None else {}
        self.cluster_key = cluster_key
        self._writers = writers_for(kv_transport)
        self._callers: dict[str, Caller] = {}

    async def prepare(self) -> None:
        """Start what takes a while, NIXL half a second, so that the first handoff need not wait for it."""
        for writers in self._writers.values():
            await asyncio.to_thread(writers.prepare)

    def dial(self, grant: LeaseGrant) -> HandoffLink:
        receiver = self.local.get(grant.address)
        if receiver is not None:
            return LocalHandoff(receiver, grant.lease)
        caller = self._callers.get(grant.address)
        if caller is None:
            caller = self._callers[grant.address] = Caller(grant.address, self.cluster_key)
        return GrpcHandoff(caller, writer_to(self._writers, grant.transports), grant.lease)

    async def close(self) -> None:
        for caller in self._callers.values():
            await caller.close()
        self._callers.clear()
        for writers in self._writers.values():
            writers.close()
