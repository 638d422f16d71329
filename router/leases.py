"""The router's end of the leases: one session a decode worker, one mailbox a lease.

Whatever ends a lease, from any side, arrives in its mailbox as an error or a finish, exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from serving.errors import MillraceError, WorkerLost
from serving.links import DecodeSession, DecodeWorkerLink, LeaseEvent
from serving.messages import Build, Delta, LeaseGrant, LeaseId, LeaseOrder, Request


class RouterLease:
    """One open lease: its fence, its grant, and what its worker sends."""

    def __init__(self, sessions: WorkerSession, fence: LeaseId):
        self.worker = sessions
        self.fence = fence
        self.grant: LeaseGrant | None = None
        self.build: Build | None = None  # what will write the text
        self._mail: asyncio.Queue[Delta | MillraceError] = asyncio.Queue()
        self.failed: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()

    def deliver(self, event: LeaseEvent) -> None:
        if event.epoch != self.fence.epoch:
            return  # of a try that is over
        if event.error is not None:
            self.fail(event.error)
        elif event.delta is not None:
            self._mail.put_nowait(event.delta)

    def fail(self, error: MillraceError) -> None:
        """The lease is over: whoever waits for it hears why."""
        if not self.failed.done():
            self.failed.set_result(error)
            self._mail.put_nowait(error)

    def interrupt(self, error: MillraceError) -> None:
        """The prefill behind the lease failed: `deltas` raises it, but the lease itself may be tried again."""
        self._mail.put_nowait(error)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What the worker decodes, until a finish; raises what ended the lease otherwise."""
        while True:
            item = await self._mail.get()
            if isinstance(item, MillraceError):
                raise item
            yield item
            if item.finish is not None:
                return

    async def advance(self, request: Request, generated: Sequence[int]) -> None:
        """Begin the lease anew for another prefill try, with the tokens known by now."""
        fence = LeaseId(lease=self.fence.lease, epoch=self.fence.epoch + 1, instance=self.fence.instance)
        self.fence = fence
        self._mail = asyncio.Queue()
        if self.failed.done():
            raise self.failed.result()
        order = LeaseOrder(lease=fence, request=request, generated=tuple(generated))
        self.grant = await self.worker.session.advance(order)


class NoLease:
    """What stands in for a lease when a single token is asked for: prefill draws it, nothing follows."""

    grant = None

    def __init__(self, lease_id: str, build: Build | None):
        self.build = build
        self.fence = LeaseId(lease=lease_id, epoch=0, instance="")
        self.failed: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()

    def fail(self, error: MillraceError) -> None:
        """Whoever waits for the token hears why there will be none."""
        if not self.failed.done():
            self.failed.set_result(error)

    def interrupt(self, error: MillraceError) -> None:
        """Nothing waits for deltas."""

    async def deltas(self) -> AsyncIterator[Delta]:
        raise AssertionError("a request without a lease ends with its first token")
        yield

    async def advance(self, request: Request, generated: Sequence[int]) -> None:
        """There is nothing to begin anew."""


class WorkerSession:
    """A session with one decode worker (by instance) and the leases in it."""

    def __init__(self, instance: str):
        self.instance = instance
        self.session: DecodeSession
        self.leases: dict[str, RouterLease] = {}
        self.lost: MillraceError | None = None

    @staticmethod
    async def connect(link: DecodeWorkerLink, instance: str, router: str) -> WorkerSession:
        """Raises WorkerLost."""
        made = WorkerSession(instance)
        made.session = await link.connect(router, made._deliver, made.lose)
        return made

    def _deliver(self, events: Sequence[LeaseEvent]) -> None:
        for event in events:
            lease = self.leases.get(event.lease)
            if lease is not None:
                lease.deliver(event)

    def lose(self, error: MillraceError) -> None:
        """The session is over: so are all its leases."""
        self.lost = error
        for lease in list(self.leases.values()):
            lease.fail(error)

    async def open(self, lease_id: str, request: Request, generated: Sequence[int]) -> RouterLease:
        """Raises NoRoom, Draining, WorkerLost, InvalidRequest. Close what this returns with `close_lease`."""
        if self.lost is not None:
            raise WorkerLost(self.lost.message, code=self.lost.code)
        fence = LeaseId(lease=lease_id, epoch=0, instance=self.instance)
        lease = RouterLease(self, fence)
        self.leases[lease_id] = lease
        try:
            lease.grant = await self.session.open(LeaseOrder(lease=fence, request=request, generated=tuple(generated)))
        except BaseException:
            self.close_lease(lease)
            raise
        return lease

    def close_lease(self, lease: RouterLease) -> None:
        """Forget the lease and have its worker free it. Safe to repeat."""
        if self.leases.pop(lease.fence.lease, None) is not None and self.lost is None:
            self.session.cancel(lease.fence.lease)

    async def close(self) -> None:
        self.lose(WorkerLost("the router closed its session"))
        await self.session.close()
