"""The receiving half of a `Push` stream: each message goes to the receiver, and its answer is returned.

A refusal is an answer like any other. The stream goes on until its sender ends it: messages under way by then would
otherwise break it, and the reason would be lost.
"""

from __future__ import annotations

from kvcache.handoff.chunk import Commit
from kvcache.handoff.local import Receiver
from kvcache.handoff.messages import PushFrame, chunk_from_pb
from kvcache.transfer.lent_memory import GRPC, LentBuffers, MemoryLenders
from serving.errors import InvalidRequest, MillraceError
from serving.messages import LeaseId
from serving.proto import millrace_pb2 as pb
from serving.wire import error_to_pb, from_pb


class IncomingHandoff:
    """One handoff as its receiver sees it. Give it every message, then `close` it, however the stream ended."""

    def __init__(self, receiver: Receiver, lenders: MemoryLenders | None = None):
        self.receiver = receiver
        self.lenders = lenders or MemoryLenders()
        self.via = GRPC  # the transport of the last chunk
        self._lent = LentBuffers()
        self._greeted = False
        self._settled = False
        self._refused = False

    async def take(self, frame: PushFrame) -> pb.PushReply | None:
        """The answer, if there is one. After a refusal all messages but the last are ignored."""
        if frame.message.WhichOneof("part") == "settled":
            self._settled = True
            return None
        if self._refused:
            return None
        try:
            return await self._take(frame)
        except MillraceError as error:
            self._refused = True
            return pb.PushReply(error=error_to_pb(error))

    async def _take(self, frame: PushFrame) -> pb.PushReply | None:
        message = frame.message
        part = message.WhichOneof("part")
        if (part == "hello") is self._greeted:
            raise InvalidRequest("a handoff begins with a hello, and has no second one", param="hello")
        if part == "hello":
            self._greeted = True
            return pb.PushReply(welcome=await self._begin(message.hello))
        if part == "commit":
            lacking = await self.receiver.commit(from_pb(message.commit, Commit), self.via)
            if lacking:
                return pb.PushReply(lacking=pb.TokenRange(start=lacking.start, end=lacking.stop))
            return pb.PushReply(committed=True)
        if part != "chunk":
            raise InvalidRequest("a message of a handoff is empty, or of a kind unknown here", param="part")
        return await self._chunk(message.chunk, frame.payload)

    async def _begin(self, hello: pb.PushHello) -> pb.PushWelcome:
        fence = from_pb(hello.lease, LeaseId) if hello.HasField("lease") else None
        start = await self.receiver.begin(fence, hello.generation)
        self._lent = self.lenders.lend(hello.transport)
        return pb.PushWelcome(buffers=self._lent.addresses, buffer_size=self._lent.size, start=start)

    async def _chunk(self, chunk: pb.Chunk, payload: bytes | memoryview) -> pb.PushReply | None:
        if not chunk.HasField("buffer"):
            await self.receiver.receive(chunk_from_pb(chunk, payload), GRPC)
            return None
        self.via = self._lent.kind
        copied = await self._lent.taken(chunk.buffer, chunk.buffer_bytes)
        await self.receiver.receive(chunk_from_pb(chunk, copied), self.via)
        return pb.PushReply(freed_buffer=chunk.buffer)

    def close(self) -> None:
        """The stream is over. Only if the sender said so it is certain that nothing more will be written."""
        self._lent.give_back(settled=self._settled)
