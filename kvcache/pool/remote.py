"""A node of the pool behind gRPC (PoolLink). It translates; a deadline bounds every call but listening to events.

The in-process form is the node itself (kvcache.pool.node).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.links import BlockEntry, BlockSelection, PoolEvent, PoolStat
from kvcache.pool.wire import (
    GET,
    PUT,
    UNREADABLE,
    SlabFrame,
    batches,
    entry_from_pb,
    event_from_pb,
    put_frame,
    put_framing,
    selection_to_pb,
    slab_framing,
    slab_of,
)
from kvcache.transfer.lent_memory import TRANSFER_BYTES, LentBuffers, MemoryLenders, PeerLender
from kvcache.transfer.shared_memory import KIND as SHM
from serving.errors import InvalidRequest
from serving.messages import PoolReport
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import Caller, asking
from serving.wire import from_pb

CALL_SECONDS = 5.0
LONG_SECONDS = 120.0  # a stream of slabs or entries, an eviction: the reader sees progress, and may stop
VERIFY_SECONDS = 3600.0  # reads a whole disk


class RemoteNode:
    """`seconds` is the deadline of calls that are answered at once; `lenders` are lent to nodes."""

    def __init__(self, caller: Caller, seconds: float = CALL_SECONDS, lenders: MemoryLenders | None = None):
        self.caller = caller
        self.seconds = seconds
        self._for_gets = PeerLender(lenders)
        self._for_puts = PeerLender(lenders, only=SHM)  # the memory of one host alone can be read by another process
        self._stub = stubs.PoolStub(caller.channel)
        self._put = caller.channel.unary_unary(PUT, put_framing.encode, pb.PutReply.FromString)
        self._get = caller.channel.stream_stream(GET, pb.GetMessage.SerializeToString, slab_framing.decode)

    async def put(self, blocks: Sequence[PoolBlock]) -> int:
        return sum([await self._put_batch(batch) for batch in batches(blocks)])

    async def _put_batch(self, blocks: Sequence[PoolBlock]) -> int:
        fits = sum(len(block.payload) for block in blocks) <= TRANSFER_BYTES
        lent = await self._for_puts.lend() if fits else LentBuffers()
        shared = bool(lent)
        try:
            return await self._send(blocks, lent)
        except InvalidRequest as error:
            if error.param != UNREADABLE or not shared:
                raise
        self._for_puts.failed(SHM)
        return await self._send(blocks, LentBuffers())

    async def _send(self, blocks: Sequence[PoolBlock], lent: LentBuffers) -> int:
        """Unless the node has answered it may still read: what it finds then, a digest tells."""
        answered = False
        try:
            with asking(self.caller.address):
                reply = await self._put(put_frame(blocks, lent), metadata=self.caller.metadata, timeout=LONG_SECONDS)
            answered = True
        finally:
            lent.give_back(settled=answered)
        return int(reply.taken)

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        request = pb.LookupRequest(keys=keys, pin_seconds=pin_seconds)
        with asking(self.caller.address):
            reply = await self._stub.Lookup(request, metadata=self.caller.metadata, timeout=self.seconds)
        return list(reply.found)

    async def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncIterator[Slab]:
        request = pb.GetRequest(keys=keys, first_part=first_part, last_part=last_part)
        lent = await self._for_gets.lend()
        if lent:
            request.transport, request.offer = lent.offer.kind, lent.offer.details
            request.buffers.extend(lent.addresses)
            request.buffer_size = lent.size
        settled = False
        try:
            call = self._get(metadata=self.caller.metadata, timeout=LONG_SECONDS)
        except BaseException:
            lent.give_back(settled=True)
            raise
        try:
            with asking(self.caller.address):
                await call.write(pb.GetMessage(request=request))
                async for frame in call:
                    if frame.message.end:
                        await call.done_writing()
                        continue
                    slab = self._taken(frame, lent)
                    if lent and frame.message.HasField("buffer"):
                        await call.write(pb.GetMessage(freed_buffer=frame.message.buffer))
                    yield slab
            settled = True  # the node has ended its stream: it writes no more
        finally:
            call.cancel()
            lent.give_back(settled=settled)

    def _taken(self, frame: SlabFrame, lent: LentBuffers) -> Slab:
        """The slab with its bytes, copied if they lie in a buffer."""
        message, payload = frame.message, frame.payload
        if message.HasField("buffer"):
            return slab_of(message, lent.read(message.buffer, message.buffer_bytes), lent.kind)
        if 0 < len(payload) <= lent.size:
            self._for_gets.failed(lent.kind)
        return slab_of(message, payload)

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
    lenders: MemoryLenders | None = None,
) -> RemoteNode:
    """The node at host:port. Nothing is sent before the first call."""
    return RemoteNode(Caller(address, cluster_key), seconds, lenders)
