"""The decode worker's gRPC door: one stream a router for leases and tokens, one stream a handoff for KV.

Translates and nothing else; what may happen is decided in decode.worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import grpc
from grpc import aio

from decode.own_prefills import PrefillingSession
from decode.worker import DecodeWorker
from kvcache.handoff.messages import PUSH, PushFrame, framing
from kvcache.handoff.receiver import IncomingHandoff
from serving.errors import InvalidRequest, MillraceError, StaleLease, WorkerLost
from serving.links import DecodeSession, LeaseEvent, PrefillLink
from serving.messages import LeaseId, LeaseOrder, Prefilled
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import answering, handle
from serving.wire import error_to_pb, event_to_pb, from_pb, to_pb

log = logging.getLogger(__name__)


class DecodeService(stubs.DecodeServicer):
    """Serves `Decode` for one worker at a time; None is no worker, or one that does not decode."""

    def __init__(self, worker: DecodeWorker | None, prefill: PrefillLink | None = None):
        self.worker = worker
        self.prefill = prefill  # of the same worker
        self._sessions: set[asyncio.Queue[pb.SessionReply | None]] = set()
        self._over = asyncio.Event()  # the sessions of this worker are

    def lead_to(self, worker: DecodeWorker | None, prefill: PrefillLink | None) -> None:
        """From now on it serves this worker. Sessions with the last one end, once what they have to tell is told."""
        self._over.set()
        for replies in self._sessions:
            replies.put_nowait(None)
        self._over = asyncio.Event()
        self.worker, self.prefill = worker, prefill

    def add_to(self, server: aio.Server) -> None:
        """Register with a server; `Push` without protobuf's copies of payloads (kvcache.transfer.framing)."""
        push = grpc.stream_stream_rpc_method_handler(
            self.Push, request_deserializer=framing.decode, response_serializer=pb.PushReply.SerializeToString
        )
        stubs.add_DecodeServicer_to_server(self, server)
        handle(server, PUSH, push)

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: aio.ServicerContext
    ) -> AsyncIterator[pb.SessionReply]:
        """Replies leave in the order things happened: an answer never overtakes, nor is overtaken by, its tokens."""
        replies: asyncio.Queue[pb.SessionReply | None] = asyncio.Queue()

        def deliver(events: Sequence[LeaseEvent]) -> None:
            replies.put_nowait(pb.SessionReply(events=[event_to_pb(event) for event in events]))

        def told(lease: LeaseId, outcome: Prefilled | MillraceError) -> None:
            replies.put_nowait(pb.SessionReply(prefilled=_prefilled_to_pb(lease, outcome)))

        async with answering(context):
            hello = await anext(aiter(requests), None)
            if hello is None or not hello.hello:
                raise InvalidRequest("a session begins with the router's name", param="hello")
            leases = await self._served().connect(hello.hello, deliver, lambda error: None)
            session, over = PrefillingSession(leases, self.prefill, told), self._over
            reading = asyncio.create_task(self._read(requests, session, replies), name=f"session-{leases.name}")
            self._sessions.add(replies)
            try:
                yield pb.SessionReply(welcome=True)
                while (reply := await replies.get()) is not None:
                    yield reply
                if not over.is_set():
                    await reading  # what broke it is not a session that ended
            finally:
                self._sessions.discard(replies)
                reading.cancel()
                try:
                    await asyncio.gather(reading, return_exceptions=True)
                finally:  # a stream that ended may be cancelled yet: its leases are given up in any case
                    await session.close()

    def _served(self) -> DecodeWorker:
        if self.worker is None:
            raise StaleLease("this worker decodes nothing now", code="role")
        return self.worker

    async def _read(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        session: DecodeSession,
        replies: asyncio.Queue[pb.SessionReply | None],
    ) -> None:
        try:
            async for request in requests:
                kind = request.WhichOneof("event")
                if kind == "cancel":
                    session.cancel(request.cancel)
                elif kind in ("open", "advance"):
                    await self._answer_surely(session, request, replies)
        finally:
            replies.put_nowait(None)

    async def _answer_surely(
        self, session: DecodeSession, request: pb.SessionRequest, replies: asyncio.Queue[pb.SessionReply | None]
    ) -> None:
        """Answer one order. A mistake of ours is told as its error: the session holds the leases of others."""
        answering = asyncio.create_task(self._answer(session, request, replies), name="answer-order")
        try:
            await asyncio.wait([answering])
        finally:
            answering.cancel()
        if (mistake := answering.exception()) is not None:
            order = request.open if request.HasField("open") else request.advance
            log.error("an order for lease %s broke", order.lease.lease, exc_info=mistake)
            error = WorkerLost(f"the worker could not take the order: {mistake!r}")  # another may
            replies.put_nowait(pb.SessionReply(answer=pb.LeaseAnswer(lease=order.lease, error=error_to_pb(error))))

    async def _answer(
        self, session: DecodeSession, request: pb.SessionRequest, replies: asyncio.Queue[pb.SessionReply | None]
    ) -> None:
        advance = request.HasField("advance")
        order = from_pb(request.advance if advance else request.open, LeaseOrder)
        answer = pb.LeaseAnswer(lease=to_pb(order.lease, pb.LeaseId))
        try:
            grant = await (session.advance(order) if advance else session.open(order))
            answer.grant.CopyFrom(to_pb(grant, pb.LeaseGrant))
        except MillraceError as error:
            answer.error.CopyFrom(error_to_pb(error))
        replies.put_nowait(pb.SessionReply(answer=answer))

    async def Push(
        self, messages: AsyncIterator[PushFrame], context: aio.ServicerContext
    ) -> AsyncIterator[pb.PushReply]:
        """Frames, which the handler of `add_to` makes of the bytes."""
        async with answering(context):
            worker = self._served()
        incoming = IncomingHandoff(worker, worker.lenders)
        worker.receiving += 1
        try:
            async for message in messages:
                reply = await incoming.take(message)
                if reply is not None:
                    yield reply
        finally:
            incoming.close()
            worker.receiving -= 1


def _prefilled_to_pb(lease: LeaseId, outcome: Prefilled | MillraceError) -> pb.LeasePrefilled:
    message = pb.LeasePrefilled(lease=to_pb(lease, pb.LeaseId))
    if isinstance(outcome, MillraceError):
        message.error.CopyFrom(error_to_pb(outcome))
    else:
        message.prefilled.CopyFrom(to_pb(outcome, pb.Prefilled))
    return message
