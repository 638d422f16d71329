"""The pool node's gRPC service. It translates; what may happen is decided in the node and its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc
from grpc import aio

from kvcache.pool.block import Slab
from kvcache.pool.links import BlockSelection
from kvcache.pool.node import PoolNode
from kvcache.pool.wire import (
    END,
    GET,
    PUT,
    PutFrame,
    SlabFrame,
    blocks_of,
    put_framing,
    slab_frame,
    slab_framing,
)
from kvcache.transfer.choice import AUTO, writers_for
from kvcache.transfer.remote_write import BufferSender, writer_to
from serving.errors import InvalidRequest
from serving.messages import TransportOffer
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import answering, handle
from serving.tracing import PhaseSpan, context_of
from serving.wire import from_pb, to_pb


class PoolService(stubs.PoolServicer):
    """Serves `Pool` for one node."""

    def __init__(self, node: PoolNode, kv_transport: str = AUTO):
        self.node = node
        self._writers = writers_for(kv_transport)

    def add_to(self, server: aio.Server) -> None:
        """Register with a server; `Put` and `Get` without protobuf's copies of payloads."""
        put = grpc.unary_unary_rpc_method_handler(
            self.Put, request_deserializer=put_framing.decode, response_serializer=pb.PutReply.SerializeToString
        )
        get = grpc.stream_stream_rpc_method_handler(
            self.Get, request_deserializer=pb.GetMessage.FromString, response_serializer=slab_framing.encode
        )
        stubs.add_PoolServicer_to_server(self, server)
        handle(server, PUT, put)
        handle(server, GET, get)

    def close(self) -> None:
        for writers in self._writers.values():
            writers.close()

    async def Put(self, frame: PutFrame, context: aio.ServicerContext) -> pb.PutReply:
        async with answering(context):
            count = await self.node.put(await asyncio.to_thread(blocks_of, frame))
        return pb.PutReply(taken=count)

    async def Lookup(self, request: pb.LookupRequest, context: aio.ServicerContext) -> pb.LookupReply:
        async with answering(context):
            with self._phase("millrace.pool.lookup", context) as phase:
                found = await self.node.lookup(tuple(request.keys), request.pin_seconds)
                phase.attributes |= {"millrace.blocks": len(request.keys), "millrace.found": sum(found)}
        return pb.LookupReply(found=found)

    async def Get(
        self, messages: AsyncIterator[pb.GetMessage], context: aio.ServicerContext
    ) -> AsyncIterator[SlabFrame]:
        """Frames, which the handler of `add_to` turns into bytes."""
        async with answering(context):
            with self._phase("millrace.pool.get", context):
                async with aclosing(self._frames(messages, context)) as frames:
                    async for frame in frames:
                        yield frame

    def _phase(self, name: str, context: aio.ServicerContext) -> PhaseSpan:
        """A span of the asker's trace, if the call is part of one."""
        return PhaseSpan(name, context_of(context.invocation_metadata()))

    async def _frames(
        self, messages: AsyncIterator[pb.GetMessage], context: aio.ServicerContext
    ) -> AsyncGenerator[SlabFrame]:
        first = await anext(aiter(messages), None)
        if first is None or not first.HasField("request"):
            raise InvalidRequest("a get begins with what is asked for", param="request")
        request = first.request
        offers = [TransportOffer(kind=request.transport, details=request.offer)] if request.buffers else []
        buffers = BufferSender(writer_to(self._writers, offers), context.peer())
        await buffers.lent(request.buffers, request.buffer_size)
        freeing = asyncio.create_task(_take_freed(messages, buffers), name="get-freed")
        try:
            await buffers.connect()
            found = self.node.get(tuple(request.keys), request.first_part, request.last_part)
            async with aclosing(found) as slabs:
                async for slab in slabs:
                    yield await _sent(slab, buffers)
            if request.buffers:  # a message on its way to a stream that is over would break it
                yield END
                await freeing
        finally:
            freeing.cancel()
            await asyncio.gather(freeing, return_exceptions=True)
            await buffers.settle()

    async def Evict(self, request: pb.Selection, context: aio.ServicerContext) -> pb.EvictReply:
        async with answering(context):
            blocks = await self.node.evict(from_pb(request, BlockSelection))
        return pb.EvictReply(blocks=blocks)

    async def Stat(self, request: pb.StatRequest, context: aio.ServicerContext) -> pb.PoolStat:
        async with answering(context):
            report = await self.node.report()
        return to_pb(report, pb.PoolStat)

    async def List(self, request: pb.Selection, context: aio.ServicerContext) -> AsyncIterator[pb.PoolEntry]:
        async with answering(context), aclosing(self.node.entries(from_pb(request, BlockSelection))) as found:
            async for entry in found:
                yield to_pb(entry, pb.PoolEntry)

    async def Verify(self, request: pb.VerifyRequest, context: aio.ServicerContext) -> pb.VerifyReply:
        async with answering(context):
            read, corrupt = await self.node.verify()
        return pb.VerifyReply(read=read, corrupt=corrupt)

    async def Events(self, request: pb.EventsRequest, context: aio.ServicerContext) -> AsyncIterator[pb.PoolEvent]:
        async with answering(context), aclosing(self.node.events()) as events:
            async for event in events:
                yield to_pb(event, pb.PoolEvent)


async def _take_freed(messages: AsyncIterator[pb.GetMessage], buffers: BufferSender) -> None:
    """Take the buffers that the asker frees until it ends its side."""
    async for message in messages:
        if message.WhichOneof("part") == "freed_buffer":
            buffers.freed(message.freed_buffer)


async def _sent(slab: Slab, buffers: BufferSender) -> SlabFrame:
    """The slab's frame: its bytes are in a buffer by then, or go along. Waits for a free buffer."""
    buffer = await buffers.buffer(slab.payload)
    if buffer is not None and await buffers.arrived(buffers.write(buffer, slab.payload)):
        return slab_frame(slab, buffer)
    return slab_frame(slab)
