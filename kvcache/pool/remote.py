"""A node of the pool behind gRPC (PoolLink). Translates and nothing else; a deadline bounds every call but listening.

The in-process form is the node itself (kvcache.pool.node).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvcache.pool import puts
from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.links import BlockEntry, BlockSelection, PoolEvent, PoolStat
from kvcache.pool.puts import PUT, UNREADABLE, Leaving, Room, batches
from kvcache.pool.slabs import GET, LendersOnDemand, Ways, from_wire
from kvcache.pool.wire import entry_from_pb, event_from_pb, selection_to_pb
from serving.errors import InvalidRequest
from serving.messages import PoolReport
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import Caller, asking
from serving.wire import from_pb

CALL_SECONDS = 5.0
LONG_SECONDS = 120.0  # a stream of slabs or entries, an eviction: whoever reads sees progress, and may leave
VERIFY_SECONDS = 3600.0  # reads a whole disk


class RemoteNode:
    """`seconds` is the deadline of calls that are answered at once; `lenders` are lent to nodes."""

    def __init__(self, caller: Caller, seconds: float = CALL_SECONDS, lenders: LendersOnDemand | None = None):
        self.caller = caller
        self.seconds = seconds
        self._ways = Ways(lenders)
        self._leaving = Leaving(lenders)
        self._stub = stubs.PoolStub(caller.channel)
        self._put = caller.channel.unary_unary(PUT, puts.to_wire, pb.PutReply.FromString)
        self._get = caller.channel.stream_stream(GET, pb.GetMessage.SerializeToString, from_wire)

    async def put(self, blocks: Sequence[PoolBlock]) -> int:
        return sum([await self._put_batch(batch) for batch in batches(blocks)])

    async def _put_batch(self, blocks: Sequence[PoolBlock]) -> int:
        room = await self._leaving.room(sum(len(block.payload) for block in blocks))
        try:
            return await self._send(blocks, room)
        except InvalidRequest as error:
            if error.param != UNREADABLE or not room.shared:
                raise
        self._leaving.leads_nowhere()
        return await self._send(blocks, await self._leaving.room(0))

    async def _send(self, blocks: Sequence[PoolBlock], room: Room) -> int:
        answered = False
        try:
            with asking(self.caller.address):
                reply = await self._put(room.frame(blocks), metadata=self.caller.metadata, timeout=LONG_SECONDS)
            answered = True
        finally:
            room.close(answered=answered)
        return int(reply.taken)

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        request = pb.LookupRequest(keys=keys, pin_seconds=pin_seconds)
        with asking(self.caller.address):
            reply = await self._stub.Lookup(request, metadata=self.caller.metadata, timeout=self.seconds)
        return list(reply.found)

    async def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncIterator[Slab]:
        request = pb.GetRequest(keys=keys, first_part=first_part, last_part=last_part)
        arrival = await self._ways.arrival()
        arrival.lend(request)
        call = self._get(metadata=self.caller.metadata, timeout=LONG_SECONDS)
        try:
            with asking(self.caller.address):
                await call.write(pb.GetMessage(request=request))
                async for frame in call:
                    if frame.message.end:
                        await call.done_writing()
                        continue
                    slab, slot = arrival.take(frame)
                    if slot is not None:
                        await call.write(pb.GetMessage(freed=slot))
                    yield slab
            arrival.settled()
        finally:
            call.cancel()
            arrival.close()

    async def evict(self, what: BlockSelection) -> int:
        with asking(self.caller.address):
            reply = await self._stub.Evict(selection_to_pb(what), metadata=self.caller.metadata, timeout=LONG_SECONDS)
        return int(reply.blocks)

    async def stat(self) -> PoolStat:
        return (await self.report()).stat

    async def report(self) -> PoolReport:
        with asking(self.caller.address):
            reply = await self._stub.Stat(pb.StatRequest(), metadata=self.caller.metadata, timeout=self.seconds)
        return from_pb(reply, PoolReport)

    async def entries(self, what: BlockSelection) -> AsyncIterator[BlockEntry]:
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


def dial(
    address: str,
    cluster_key: str | None = None,
    seconds: float = CALL_SECONDS,
    lenders: LendersOnDemand | None = None,
) -> RemoteNode:
    """The node at host:port. Nothing is sent before the first call."""
    return RemoteNode(Caller(address, cluster_key), seconds, lenders)
