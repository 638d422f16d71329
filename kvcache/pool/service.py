"""The pool node's gRPC door. Translates and nothing else; what may happen is decided in the node and its store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar, cast

import grpc
from grpc import aio

from kvcache.pool import puts
from kvcache.pool.node import PoolNode
from kvcache.pool.puts import PUT, PutFrame, taken
from kvcache.pool.slabs import END, GET, Delivery, SlabFrame, to_wire
from kvcache.pool.wire import entry_to_pb, event_to_pb, selection_from_pb
from kvcache.transfer.choice import writers_for
from serving.errors import InvalidRequest
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import answering, handle
from serving.wire import to_pb

T = TypeVar("T")


class PoolService(stubs.PoolServicer):
    """Serves `Pool` for one node."""

    def __init__(self, node: PoolNode):
        self.node = node
        self._carriers = writers_for("auto")

    def add_to(self, server: aio.Server) -> None:
        """Register with a server; `Put` and `Get` without protobuf's copies of payloads."""
        put = grpc.unary_unary_rpc_method_handler(
            self.Put, request_deserializer=puts.from_wire, response_serializer=pb.PutReply.SerializeToString
        )
        get = grpc.stream_stream_rpc_method_handler(
            self.Get, request_deserializer=pb.GetMessage.FromString, response_serializer=to_wire
        )
        stubs.add_PoolServicer_to_server(self, server)
        handle(server, PUT, put)
        handle(server, GET, get)

    def close(self) -> None:
        for writers in self._carriers.values():
            writers.close()

    async def Put(self, frame: PutFrame, context: aio.ServicerContext) -> pb.PutReply:
        async with answering(context):
            count = await self.node.put(await asyncio.to_thread(taken, frame))
        return pb.PutReply(taken=count)

    async def Lookup(self, request: pb.LookupRequest, context: aio.ServicerContext) -> pb.LookupReply:
        async with answering(context):
            found = await self.node.lookup(tuple(request.keys), request.pin_seconds)
        return pb.LookupReply(found=found)

    async def Get(
        self, messages: AsyncIterator[pb.GetMessage], context: aio.ServicerContext
    ) -> AsyncIterator[SlabFrame]:
        """Frames, which the handler of `add_to` turns into bytes."""
        async with answering(context):
            first = await anext(aiter(messages), None)
            if first is None or not first.HasField("request"):
                raise InvalidRequest("a get begins with what is asked for", param="request")
            request = first.request
            delivery = Delivery(self._carriers, request)
            hearing = asyncio.create_task(_hear(messages, delivery), name="get-freed")
            try:
                await delivery.begin()
                slabs = self.node.get(tuple(request.keys), request.first_part, request.last_part)
                async with leaving(slabs) as sent:
                    async for slab in sent:
                        yield await delivery.frame(slab)
                if request.slots:  # a message on its way to a stream that is over would break it
                    yield END
                    await hearing
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
                await delivery.close()

    async def Evict(self, request: pb.Selection, context: aio.ServicerContext) -> pb.EvictReply:
        async with answering(context):
            blocks = await self.node.evict(selection_from_pb(request))
        return pb.EvictReply(blocks=blocks)

    async def Stat(self, request: pb.StatRequest, context: aio.ServicerContext) -> pb.PoolStat:
        async with answering(context):
            report = await self.node.report()
        return to_pb(report, pb.PoolStat)

    async def List(self, request: pb.Selection, context: aio.ServicerContext) -> AsyncIterator[pb.PoolEntry]:
        async with answering(context), leaving(self.node.entries(selection_from_pb(request))) as entries:
            async for entry in entries:
                yield entry_to_pb(entry)

    async def Verify(self, request: pb.VerifyRequest, context: aio.ServicerContext) -> pb.VerifyReply:
        async with answering(context):
            read, corrupt = await self.node.verify()
        return pb.VerifyReply(read=read, corrupt=corrupt)

    async def Events(self, request: pb.EventsRequest, context: aio.ServicerContext) -> AsyncIterator[pb.PoolEvent]:
        async with answering(context), leaving(self.node.events()) as events:
            async for event in events:
                yield event_to_pb(event)


async def _hear(messages: AsyncIterator[pb.GetMessage], delivery: Delivery) -> None:
    """Which slots are free again, while the asker says so."""
    async for message in messages:
        if message.WhichOneof("part") == "freed":
            delivery.freed(message.freed)


def leaving(stream: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """Around a stream of the node's: when the caller is gone, so is the stream, at once."""
    return aclosing(cast("AsyncGenerator[T, None]", stream))
