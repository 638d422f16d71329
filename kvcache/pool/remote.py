"""A node of the pool behind gRPC (PoolLink). Translates and nothing else; a deadline bounds every call but listening.

The in-process form is the node itself (kvcache.pool.node).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.links import Entry, PoolEvent, PoolStat, Selection
from kvcache.pool.wire import block_to_pb, entry_from_pb, event_from_pb, selection_to_pb, slab_from_pb
from serving.messages import PoolReport
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import Caller, asking
from serving.wire import pool_report_from_pb

CALL_SECONDS = 5.0
LONG_SECONDS = 120.0  # a stream of slabs or entries, an eviction: whoever reads sees progress, and may leave
VERIFY_SECONDS = 3600.0  # reads a whole disk


class RemoteNode:
    """`seconds` is the deadline of calls that are answered at once."""

    def __init__(self, caller: Caller, seconds: float = CALL_SECONDS):
        self.caller = caller
        self.seconds = seconds
        self._stub = stubs.PoolStub(caller.channel)

    async def put(self, blocks: Sequence[PoolBlock]) -> int:
        async def messages() -> AsyncIterator[pb.PoolBlock]:
            for block in blocks:
                yield block_to_pb(block)

        with asking(self.caller.address):
            reply = await self._stub.Put(messages(), metadata=self.caller.metadata, timeout=LONG_SECONDS)
        return int(reply.taken)

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        request = pb.LookupRequest(keys=keys, pin_seconds=pin_seconds)
        with asking(self.caller.address):
            reply = await self._stub.Lookup(request, metadata=self.caller.metadata, timeout=self.seconds)
        return list(reply.found)

    async def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncIterator[Slab]:
        request = pb.GetRequest(keys=keys, first_part=first_part, last_part=last_part)
        call = self._stub.Get(request, metadata=self.caller.metadata, timeout=LONG_SECONDS)
        try:
            with asking(self.caller.address):
                async for message in call:
                    yield slab_from_pb(message)
        finally:
            call.cancel()

    async def evict(self, what: Selection) -> int:
        with asking(self.caller.address):
            reply = await self._stub.Evict(selection_to_pb(what), metadata=self.caller.metadata, timeout=LONG_SECONDS)
        return int(reply.blocks)

    async def stat(self) -> PoolStat:
        return (await self.report()).stat

    async def report(self) -> PoolReport:
        with asking(self.caller.address):
            reply = await self._stub.Stat(pb.StatRequest(), metadata=self.caller.metadata, timeout=self.seconds)
        return pool_report_from_pb(reply)

    async def entries(self, what: Selection) -> AsyncIterator[Entry]:
        call = self._stub.List(selection_to_pb(what), metadata=self.caller.metadata, timeout=LONG_SECONDS)
        try:
            with asking(self.caller.address):
                async for message in call:
                    yield entry_from_pb(message)
        finally:
            call.cancel()

    async def verify(self) -> tuple[int, int]:
        with asking(self.caller.address):
            reply = await self._stub.Verify(pb.VerifyRequest(), metadata=self.caller.metadata, timeout=VERIFY_SECONDS)
        return int(reply.read), int(reply.corrupt)

    async def events(self) -> AsyncIterator[PoolEvent]:
        call = self._stub.Events(pb.EventsRequest(), metadata=self.caller.metadata)
        try:
            with asking(self.caller.address):
                async for message in call:
                    yield event_from_pb(message)
        finally:
            call.cancel()

    async def close(self) -> None:
        await self.caller.close()


def dial(address: str, cluster_key: str | None = None, seconds: float = CALL_SECONDS) -> RemoteNode:
    """The node at host:port. Nothing is sent before the first call."""
    return RemoteNode(Caller(address, cluster_key), seconds)
