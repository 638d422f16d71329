"""The pool node's gRPC door. Translates and nothing else; what may happen is decided in the node and its store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar, cast

from grpc import aio

from kvcache.pool.block import PoolBlock
from kvcache.pool.node import PoolNode
from kvcache.pool.wire import block_from_pb, entry_to_pb, event_to_pb, selection_from_pb, slab_to_pb
from serving.proto import pool_pb2 as pb
from serving.proto import pool_pb2_grpc as stubs
from serving.rpc import answering
from serving.wire import pool_report_to_pb

BATCH_BYTES = 8 << 20  # blocks of a put are stored when so many bytes have come: the sender waits meanwhile

T = TypeVar("T")


class PoolService(stubs.PoolServicer):
    """Serves `Pool` for one node."""

    def __init__(self, node: PoolNode):
        self.node = node

    async def Put(self, requests: AsyncIterator[pb.PoolBlock], context: aio.ServicerContext) -> pb.PutReply:
        taken = 0
        async with answering(context):
            async for blocks in batches(requests):
                taken += await self.node.put(blocks)
        return pb.PutReply(taken=taken)

    async def Lookup(self, request: pb.LookupRequest, context: aio.ServicerContext) -> pb.LookupReply:
        async with answering(context):
            found = await self.node.lookup(tuple(request.keys), request.pin_seconds)
        return pb.LookupReply(found=found)

    async def Get(self, request: pb.GetRequest, context: aio.ServicerContext) -> AsyncIterator[pb.Slab]:
        slabs = self.node.get(tuple(request.keys), request.first_part, request.last_part)
        async with answering(context), leaving(slabs) as sent:
            async for slab in sent:
                yield slab_to_pb(slab)

    async def Evict(self, request: pb.Selection, context: aio.ServicerContext) -> pb.EvictReply:
        async with answering(context):
            blocks = await self.node.evict(selection_from_pb(request))
        return pb.EvictReply(blocks=blocks)

    async def Stat(self, request: pb.StatRequest, context: aio.ServicerContext) -> pb.PoolStat:
        async with answering(context):
            report = await self.node.report()
        return pool_report_to_pb(report)

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


def leaving(stream: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """Around a stream of the node's: when the caller is gone, so is the stream, at once."""
    return aclosing(cast("AsyncGenerator[T, None]", stream))


async def batches(requests: AsyncIterator[pb.PoolBlock]) -> AsyncIterator[list[PoolBlock]]:
    """Blocks as they come, some megabytes at a time."""
    blocks: list[PoolBlock] = []
    size = 0
    async for message in requests:
        blocks.append(block_from_pb(message))
        size += len(message.payload)
        if size >= BATCH_BYTES:
            yield blocks
            blocks, size = [], 0
    if blocks:
        yield blocks
