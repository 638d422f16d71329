"""The router's end of the leases: a session with each decode worker, the leases in it, and what its worker sends.

Whatever ends a lease, from any side, arrives as an error or a finish, exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from router.request_state import RequestState
from serving.errors import MillraceError, WorkerLost
from serving.links import DecodeSession, DecodeWorkerLink, LeaseEvent
from serving.messages import Delta, LeaseGrant, LeaseId


class RouterLease(Protocol):
    """Room for one request's decode. `failed` is done once the lease is over, with the reason."""

    fence: LeaseId
    grant: LeaseGrant | None
    failed: asyncio.Future[MillraceError]

    def interrupt(self, error: MillraceError) -> None:
        """The prefill into the lease failed after its first token: `next` raises; the lease itself stays."""

    async def next(self) -> Delta:
        """The next tokens the worker has decoded. Raises what ended or interrupted the lease."""
        ...

    async def advance(self, state: RequestState) -> None:
        """Begin the lease anew for another prefill, with the tokens known by now. Raises what ends the lease."""

    def fail(self, error: MillraceError) -> None:
        """The lease is over."""

    def close(self) -> None:
        """The request has left the lease: its worker frees it. Safe to repeat."""


class WorkerLease:
    """A lease on a decode worker (RouterLease), within the router's session with it."""

    def __init__(self, worker: WorkerSession, fence: LeaseId):
        self.worker = worker
        self.fence = fence
        self.grant: LeaseGrant | None = None
        self.failed: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()
        self._received: asyncio.Queue[Delta | MillraceError] = asyncio.Queue()

    def take(self, event: LeaseEvent) -> None:
        """What the worker has sent. Events of an earlier epoch are dropped."""
        if event.epoch != self.fence.epoch:
            return
        if event.error is not None:
            self.fail(event.error)
        elif event.delta is not None:
            self._received.put_nowait(event.delta)

    def fail(self, error: MillraceError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
            self._received.put_nowait(error)

    def interrupt(self, error: MillraceError) -> None:
        self._received.put_nowait(error)

    async def next(self) -> Delta:
        item = await self._received.get()
        if isinstance(item, MillraceError):
            raise item
        return item

    async def advance(self, state: RequestState) -> None:
        self.fence = LeaseId(lease=self.fence.lease, epoch=self.fence.epoch + 1, instance=self.fence.instance)
        self._received = asyncio.Queue()
        if self.failed.done():
            raise self.failed.result()
        self.grant = await self.worker.session.advance(state.order(self.fence))

    def close(self) -> None:
        self.worker.close_lease(self.fence.lease)


class PrefillOnlyLease:
    """Stands in for a lease when a single token is asked for (RouterLease): prefill samples it, no decode follows."""

    def __init__(self, lease_id: str):
        self.grant: LeaseGrant | None = None
        self.fence = LeaseId(lease=lease_id, epoch=0, instance="")
        self.failed: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()

    def fail(self, error: MillraceError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def interrupt(self, error: MillraceError) -> None:
        """No tokens are waited for."""

    async def next(self) -> Delta:
        raise AssertionError("a request without a lease ends with its first token")

    async def advance(self, state: RequestState) -> None:
        """There is nothing to begin anew."""

    def close(self) -> None:
        """No worker holds anything."""


class WorkerSession:
    """A session with one decode worker (by instance) and the leases in it."""

    def __init__(self, instance: str):
        self.instance = instance
        self.session: DecodeSession
        self.leases: dict[str, WorkerLease] = {}
        self.lost: MillraceError | None = None

    @staticmethod
    async def connect(link: DecodeWorkerLink, instance: str, router: str) -> WorkerSession:
        """Raises WorkerLost."""
        made = WorkerSession(instance)
        made.session = await link.connect(router, made.take, made.lose)
        return made

    def take(self, events: Sequence[LeaseEvent]) -> None:
        """All events of one step of the worker."""
        for event in events:
            lease = self.leases.get(event.lease)
            if lease is not None:
                lease.take(event)

    def lose(self, error: MillraceError) -> None:
        """The session is over: so are all its leases."""
        self.lost = error
        self.fail_all(error)

    def fail_all(self, error: MillraceError) -> None:
        for lease in list(self.leases.values()):
            lease.fail(error)

    async def open(self, lease_id: str, state: RequestState) -> WorkerLease:
        """Raises NoRoom, Draining, WorkerLost, InvalidRequest. Close what this returns."""
        if self.lost is not None:
            raise WorkerLost(self.lost.message, code=self.lost.code)
        lease = WorkerLease(self, LeaseId(lease=lease_id, epoch=0, instance=self.instance))
        self.leases[lease_id] = lease
        try:
            lease.grant = await self.session.open(state.order(lease.fence))
        except BaseException:
            lease.close()
            raise
        return lease

    def close_lease(self, lease_id: str) -> None:
        """Forget the lease and have its worker free it. Safe to repeat."""
        if self.leases.pop(lease_id, None) is not None and self.lost is None:
            self.session.cancel(lease_id)

    async def close(self) -> None:
        self.lose(WorkerLost("the router closed its session"))
        await self.session.close()
