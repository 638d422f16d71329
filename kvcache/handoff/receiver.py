"""The receiving half of a `Push` stream: each message goes to the receiver, and what it is answered with comes back.

A refusal is an answer like any other. The stream goes on until its sender ends it: what was on its way by then would
otherwise break it, and the reason with it.
"""

from __future__ import annotations

from kvcache.handoff.frames import Frame
from kvcache.handoff.local import Receiver
from kvcache.handoff.messages import chunk_from_pb, commit_from_pb
from kvcache.transfer.lent_memory import LentBuffers, MemoryLender, MemoryLenders
from serving.errors import InvalidRequest, MillraceError
from serving.messages import LeaseId
from serving.proto import millrace_pb2 as pb
from serving.wire import error_to_pb, from_pb

STREAM = "grpc"


class IncomingHandoff:
    """One handoff as its receiver sees it. Give it every message, then `close` it, however the stream ended."""

    def __init__(self, receiver: Receiver, lenders: MemoryLenders | None = None):
        self.receiver = receiver
        self.lenders = lenders or MemoryLenders()
        self._landing: MemoryLender | None = None  # the one that lent the slots
        self.via = STREAM
        self._slots: LentBuffers | None = None
        self._greeted = False
        self._settled = False
        self._refused = False

    async def take(self, frame: Frame) -> pb.PushReply | None:
        """The answer, if there is one. After a refusal nothing is looked at any more."""
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

    async def _take(self, frame: Frame) -> pb.PushReply | None:
        message = frame.message
        part = message.WhichOneof("part")
        if (part == "hello") is self._greeted:
            raise InvalidRequest("a handoff begins with a hello, and has no second one", param="hello")
        if part == "hello":
            self._greeted = True
            welcome = self._welcome(message.hello.transport)
            if message.hello.HasField("lease"):
                welcome.start = await self.receiver.begin(from_pb(message.hello.lease, LeaseId))
            return pb.PushReply(welcome=welcome)
        if part == "commit":
            lacking = await self.receiver.commit(commit_from_pb(message.commit), self.via)
            if lacking:
                return pb.PushReply(lacking=pb.TokenRange(start=lacking.start, end=lacking.stop))
            return pb.PushReply(committed=True)
        if part != "chunk":
            raise InvalidRequest("a message of a handoff is empty, or of a kind unknown here", param="part")
        return await self._chunk(message.chunk, frame.payload)

    def _welcome(self, transport: str) -> pb.PushWelcome:
        """Lends slots to a sender that asks for a transport there is here."""
        self._landing = self.lenders.of(transport)
        if self._landing is not None:
            self._slots = self._landing.lend()
        if self._slots is None:
            return pb.PushWelcome()
        return pb.PushWelcome(slots=self._slots.addresses, slot_size=self._slots.size)

    async def _chunk(self, chunk: pb.Chunk, payload: bytes | memoryview) -> pb.PushReply | None:
        if not chunk.HasField("slot"):
            await self.receiver.receive(chunk_from_pb(chunk, payload), STREAM)
            return None
        self.via = transport = self._landing.kind if self._landing is not None else STREAM
        await self.receiver.receive(chunk_from_pb(chunk, self._landed(chunk.slot, chunk.slot_bytes)), transport)
        return pb.PushReply(freed=chunk.slot)

    def _landed(self, slot: int, length: int) -> bytes | memoryview:
        """What lies in a slot. One that was not lent holds nothing: the digest says so, and the receiver counts it."""
        if self._landing is None or self._slots is None:
            return b""
        return self._landing.read(self._slots, slot, length)

    def close(self) -> None:
        """The stream is over, one way or another: only the sender's word tells that nothing more will be written."""
        if self._slots is not None and self._landing is not None:
            self._landing.take_back(self._slots, settled=self._settled)
            self._slots = None
