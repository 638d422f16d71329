"""The gRPC forms of the links a router uses: a decode session over one stream, a prefill over one call, an audit.

The in-process forms are the workers themselves; both satisfy serving.links.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from router.prefill_call import BROKEN_CALL
from router.renewed_session import RenewedSession
from serving.errors import NEVER_SENT, MillraceError, StaleLease, WorkerLost
from serving.links import Deliver, LeaseEvent
from serving.messages import Audit, LeaseGrant, LeaseOrder, Prefilled, PrefillOrder
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, asking
from serving.wire import error_from_pb, event_from_pb, from_pb, to_pb

T = TypeVar("T")


class RemoteWorker:
    """A worker behind gRPC: DecodeWorkerLink, PrefillLink and AuditLink in one."""

    def __init__(self, caller: Caller):
        self.caller = caller
        self._session: RenewedSession | None = None  # the latest

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> RenewedSession:
        """Raises WorkerLost when the worker cannot be reached."""
        session = self._session = RenewedSession(
            self.caller, lambda lost: RemoteSession(self.caller, router, deliver, lost), lost
        )
        try:
            await session.welcome
        except asyncio.CancelledError:  # the worker may still answer: it would keep the session open for nobody
            await session.close()
            raise
        return session

    async def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        """A prefill that was asked for with its lease runs already, and ends with it."""
        asked = self._session.prefill_of(order.order.lease.lease) if self._session is not None else None
        if asked is not None:
            yield await asked
            return
        call = stubs.PrefillStub(self.caller.channel).Run(to_pb(order, pb.PrefillOrder), metadata=self.caller.metadata)
        try:
            with asking(self.caller.address):
                async for message in call:
                    yield from_pb(message, Prefilled)
        finally:
            call.cancel()

    async def audit(self) -> list[Audit]:
        return [from_pb(audit, Audit) for audit in (await _audit(self.caller, 5)).audits]

    async def close(self) -> None:
        await self.caller.close()


class RemoteSession:
    """One `Session` stream (DecodeSession). When it ends for any reason, `lost` is called once."""

    def __init__(self, caller: Caller, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]):
        self.caller = caller
        self.deliver = deliver
        self.lost = lost
        self.prefills: dict[str, asyncio.Future[Prefilled]] = {}  # asked for with leases, by lease
        self.welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outgoing: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._outgoing.put_nowait(pb.SessionRequest(hello=router))
        self._answers: dict[tuple[str, int], asyncio.Future[LeaseGrant]] = {}
        self._over: MillraceError | None = None
        self._task = asyncio.create_task(self._run(), name=f"session-{caller.address}")

    async def _run(self) -> None:
        error: MillraceError = WorkerLost(f"{self.caller.address} ended its session")
        try:
            with asking(self.caller.address):
                call = stubs.DecodeStub(self.caller.channel).Session(self._requests(), metadata=self.caller.metadata)
                async for reply in call:
                    self._take(reply)
        except MillraceError as broken:
            error = broken if self.welcome.done() else await self.caller.why(broken)
        finally:
            self._end(error)

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    def _take(self, reply: pb.SessionReply) -> None:
        if reply.welcome and not self.welcome.done():
            self.welcome.set_result(None)
        if reply.HasField("answer"):
            answer = reply.answer
            future = self._answers.pop((answer.lease.lease, answer.lease.epoch), None)
            if future is not None and not future.done():
                _settle(future, answer, lambda: from_pb(answer.grant, LeaseGrant))
        if reply.HasField("prefilled"):
            self._prefilled(reply.prefilled)
        if reply.events:
            self.deliver([_event(event) for event in reply.events])

    def _prefilled(self, told: pb.LeasePrefilled) -> None:
        asked = self.prefills.get(told.lease.lease)
        if asked is not None and not asked.done():
            _settle(asked, told, lambda: from_pb(told.prefilled, Prefilled))

    def _end(self, error: MillraceError) -> None:
        self._over = error
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *self.prefills.values(), self.welcome]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self._answers.clear()
        self.prefills.clear()
        self._outgoing.put_nowait(None)  # gRPC waits for the next request in a task that it does not end itself
        self.lost(error)

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        lease = order.lease.lease
        if order.prefill:
            asked = self.prefills[lease] = asyncio.get_running_loop().create_future()
            asked.add_done_callback(_retrieved)
        try:
            return await self._ask(order, pb.SessionRequest(open=to_pb(order, pb.LeaseOrder)))
        except BaseException:
            self._forget(lease)
            raise

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        self._forget(order.lease.lease)
        return await self._ask(order, pb.SessionRequest(advance=to_pb(order, pb.LeaseOrder)))

    async def _ask(self, order: LeaseOrder, request: pb.SessionRequest) -> LeaseGrant:
        if self._over is not None:
            raise WorkerLost(self._over.message, code=NEVER_SENT)
        future: asyncio.Future[LeaseGrant] = asyncio.get_running_loop().create_future()
        self._answers[order.lease.lease, order.lease.epoch] = future
        self._outgoing.put_nowait(request)
        try:
            return await future
        finally:
            self._answers.pop((order.lease.lease, order.lease.epoch), None)

    def _forget(self, lease: str) -> None:
        """Nothing comes of the prefill that was asked for with the lease."""
        asked = self.prefills.pop(lease, None)
        if asked is not None and not asked.done():
            asked.set_exception(StaleLease(f"lease {lease} is not open any more", code="lease"))

    def cancel(self, lease: str) -> None:
        self._forget(lease)
        self._outgoing.put_nowait(pb.SessionRequest(cancel=lease))

    async def close(self) -> None:
        self._outgoing.put_nowait(None)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def _audit(caller: Caller, seconds: float) -> pb.AuditReply:
    with asking(caller.address):
        stub = stubs.WorkerStub(caller.channel)
        reply: pb.AuditReply = await stub.GetAudit(pb.AuditRequest(), metadata=caller.metadata, timeout=seconds)
    return reply


def _retrieved(asked: asyncio.Future[Prefilled]) -> None:
    """Its error may be of use to nobody: asyncio need not log that."""
    if not asked.cancelled():
        asked.exception()


# What cannot be read is the error of whom it is for: others share the session.


def _settle(future: asyncio.Future[T], told: pb.LeaseAnswer | pb.LeasePrefilled, read: Callable[[], T]) -> None:
    try:
        if told.HasField("error"):
            future.set_exception(error_from_pb(told.error))
        else:
            future.set_result(read())
    except (TypeError, ValueError) as error:
        future.set_exception(_unreadable(error))


def _event(message: pb.LeaseEvent) -> LeaseEvent:
    try:
        return event_from_pb(message)
    except (TypeError, ValueError) as error:
        return LeaseEvent(message.lease, message.epoch, error=_unreadable(error))


def _unreadable(error: Exception) -> WorkerLost:
    return WorkerLost(f"the worker's answer cannot be read: {error}", code=BROKEN_CALL)
