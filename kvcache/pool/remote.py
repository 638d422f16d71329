"""A node of the pool behind gRPC (PoolLink). It translates; a deadline bounds every call but listening to events.

The in-process form is the node itself (kvcache.pool.node).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvcache.pool.block import PoolBlock, Slab
from kvcache.pool.links import BlockEntry, BlockSelection, PoolEvent
from kvcache.pool.wire import (
    GET,
    PUT,
    UNREADABLE,
    SlabFrame,
    batches,
    put_frame,
    put_framing,
    slab_framing,
    slab_of,
)
from kvcache.transfer.lent_memory import TRANSFER_BYTES, LentBuffers, MemoryLenders, PeerLender
from kvcache.transfer.shared_memory import KIND as SHM
from serving.errors import InvalidRequest, MillraceError
from serving.grpc_tls import GrpcTls
from serving.messages import PoolReport
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import Caller, asking
from serving.wire import from_pb, to_pb

CALL_SECONDS = 5.0
LONG_SECONDS = 120.0  # a stream of slabs or entries, an eviction: the reader sees progress, and may stop
VERIFY_SECONDS = 3600.0  # reads a whole disk

T = TypeVar("T")


class RemoteNode:
    """The node at host:port, to which nothing is sent before the first call.

    `seconds` is the deadline of calls that are answered at once; `lenders` are lent to it.
    """

    def __init__(
        self,
        address: str,
        cluster_key: str | None = None,
        seconds: float = CALL_SECONDS,
        lenders: MemoryLenders | None = None,
        tls: GrpcTls | None = None,
    ):
        self.caller = Caller(address, cluster_key, tls)
        self.seconds = seconds
        self._for_gets = PeerLender(lenders)
        self._for_puts = PeerLender(lenders, only=SHM)  # the memory of one host alone can be read by another process

    @property
    def _stub(self) -> stubs.PoolStub:
        return stubs.PoolStub(self.caller.channel)

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
            put = self.caller.channel.unary_unary(PUT, put_framing.encode, pb.PutReply.FromString)
            reply = await self._ask(put, put_frame(blocks, lent), LONG_SECONDS)
            answered = True
        finally:
            lent.give_back(settled=answered)
        return int(reply.taken)

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> list[bool]:
        request = pb.LookupRequest(keys=keys, pin_seconds=pin_seconds)
        return list((await self._ask(self._stub.Lookup, request, self.seconds)).found)

    async def get(self, keys: Sequence[bytes], first_part: int, last_part: int) -> AsyncGenerator[Slab, None]:
        request = pb.GetRequest(keys=keys, first_part=first_part, last_part=last_part)
        lent = await self._for_gets.lend()
        if lent:
            request.transport, request.offer = lent.offer.kind, lent.offer.details
            request.buffers.extend(lent.addresses)
            request.buffer_size = lent.size
        call, settled, heard = None, True, False
        try:
            with asking(self.caller.address):
                method = self.caller.channel.stream_stream(GET, pb.GetMessage.SerializeToString, slab_framing.decode)
                call, settled = method(metadata=self.caller.metadata, timeout=LONG_SECONDS), False
                await call.write(pb.GetMessage(request=request))
                async for frame in call:
                    heard = True
                    if frame.message.end:
                        await call.done_writing()
                        continue
                    slab = self._taken(frame, lent)
                    if lent and frame.message.HasField("buffer"):
                        await call.write(pb.GetMessage(freed_buffer=frame.message.buffer))
                    yield slab
            settled = True  # the node has ended its stream: it writes no more
        except MillraceError as error:
            told = error if heard else await self.caller.why(error)
            if told is error:
                raise
            raise told from error
        finally:
            if call is not None:
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
        return int((await self._ask(self._stub.Evict, to_pb(what, pb.Selection), LONG_SECONDS)).blocks)

    async def report(self) -> PoolReport:
        return from_pb(await self._ask(self._stub.Stat, pb.StatRequest(), self.seconds), PoolReport)

    def entries(self, what: BlockSelection) -> AsyncGenerator[BlockEntry, None]:
        return self._stream(self._stub.List, to_pb(what, pb.Selection), BlockEntry, LONG_SECONDS)

    async def verify(self) -> tuple[int, int]:
        reply = await self._ask(self._stub.Verify, pb.VerifyRequest(), VERIFY_SECONDS)
        return int(reply.read), int(reply.corrupt)

    def events(self) -> AsyncGenerator[PoolEvent, None]:
        return self._stream(self._stub.Events, pb.EventsRequest(), PoolEvent, None)

    async def close(self) -> None:
        await self.caller.close()

    async def _ask(self, method: Any, request: Any, seconds: float) -> Any:
        """The answer to one message."""
        with asking(self.caller.address):
            return await method(request, metadata=self.caller.metadata, timeout=seconds)

    async def _stream(
        self, method: Any, request: Message, kind: type[T], seconds: float | None
    ) -> AsyncGenerator[T, None]:
        """The messages that answer one, as dataclasses of this kind."""
        with asking(self.caller.address):
            call = method(request, metadata=self.caller.metadata, timeout=seconds)
            try:
                async for message in call:
                    yield from_pb(message, kind)
            finally:
                call.cancel()
