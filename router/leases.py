"""The router's end of the leases: a session with each decode worker, the leases in it, and what its worker sends.

Whatever ends a lease, from any side, arrives as an error or a finish, exactly once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from router.request_state import RequestState
from serving.errors import NEVER_SENT, MillraceError, WorkerLost
from serving.first_done import first_done
from serving.links import DecodeSession, DecodeWorkerLink, LeaseEvent
from serving.messages import Delta, LeaseGrant, LeaseId

DECODE_LOST = "decode_lost"  # of StaleLease: the prefill worker cannot reach the decode worker
OUT_OF_REACH = "out_of_reach"  # an error that repeats what is known: its worker is suspect, or was until just now


class RouterLease(Protocol):
    """Room for one request's decode. `failed` is done once the lease is over, with the reason."""

    fence: LeaseId
    grant: LeaseGrant | None
    failed: asyncio.Future[MillraceError]

    def interrupt(self, error: MillraceError) -> None:
        """The prefill into the lease failed after its first token: `next` raises; the lease itself stays.

        Where its worker decodes already, the KV has come whatever became of the call: nothing happens.
        """

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
        self._received: deque[Delta | MillraceError] = deque()
        self._arrived: asyncio.Future[None] | None = None  # what `next` waits for
        self._decodes = False  # in this epoch

    def take(self, event: LeaseEvent) -> None:
        """What the worker has sent. Events of an earlier epoch are dropped."""
        if event.epoch != self.fence.epoch:
            return
        if event.error is not None:
            self.fail(event.error)
        elif event.delta is not None:
            self._decodes = True
            self._put(event.delta)

    def _put(self, item: Delta | MillraceError) -> None:
        self._received.append(item)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def fail(self, error: MillraceError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
            self._put(error)

    def interrupt(self, error: MillraceError) -> None:
        if not self._decodes:
            self._put(error)

    async def next(self) -> Delta:
        while not self._received:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        item = self._received.popleft()
        if isinstance(item, MillraceError):
            raise item
        return item

    async def advance(self, state: RequestState) -> None:
        self.fence = LeaseId(lease=self.fence.lease, epoch=self.fence.epoch + 1, instance=self.fence.instance)
        self._received, self._decodes = deque(), False
        if self.failed.done():
            raise self.failed.result()
        self.grant = await self.worker.session.advance(state.order(self.fence, self.worker.clock()))

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

    def __init__(self, instance: str, clock: Callable[[], float]):
        self.instance = instance
        self.clock = clock
        self.session: DecodeSession
        self.leases: dict[str, WorkerLease] = {}
        self.heard = clock()  # when the worker last sent something
        self.lost: MillraceError | None = None

    @staticmethod
    async def connect(link: DecodeWorkerLink, instance: str, router: str, clock: Callable[[], float]) -> WorkerSession:
        """Raises WorkerLost."""
        made = WorkerSession(instance, clock)
        made.session = await link.connect(router, made.take, made.lose)
        return made

    def take(self, events: Sequence[LeaseEvent]) -> None:
        """All events of one step of the worker."""
        self.heard = self.clock()
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

    async def open(self, lease_id: str, state: RequestState, *, prefill: bool = False) -> WorkerLease:
        """Raises NoRoom, Draining, WorkerLost, InvalidRequest. Close what this returns."""
        if self.lost is not None:
            raise WorkerLost(self.lost.message, code=self.lost.code or NEVER_SENT)
        lease = WorkerLease(self, LeaseId(lease=lease_id, epoch=0, instance=self.instance))
        self.leases[lease_id] = lease
        try:
            lease.grant = await self.session.open(state.order(lease.fence, self.clock(), prefill=prefill))
            self.heard = self.clock()
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


class Sessions:
    """All of a router's sessions by worker instance. `router` is the name it introduces itself with."""

    def __init__(self, router: str, clock: Callable[[], float]):
        self.router = router
        self.clock = clock
        self._connecting: dict[str, asyncio.Task[WorkerSession]] = {}  # and the sessions that came of it
        self._openings: dict[str, set[asyncio.Future[MillraceError]]] = {}  # requests that wait for a worker's answer

    def established(self) -> list[WorkerSession]:
        done = [task for task in self._connecting.values() if task.done() and not task.cancelled()]
        return [task.result() for task in done if task.exception() is None]

    def heard(self, instance: str) -> float:
        """When the worker last sent something in its session; 0 without one."""
        return max((session.heard for session in self.established() if session.instance == instance), default=0.0)

    async def open(
        self, link: DecodeWorkerLink, instance: str, lease_id: str, state: RequestState, *, prefill: bool = False
    ) -> WorkerLease:
        """A lease on the worker behind `link`, in the session with it. Raises what the worker answers, or WorkerLost.

        With `prefill` it is asked to compute the prompt at once.
        WorkerLost comes as soon as the worker is taken for dead, even if it never answers.
        """
        opening = asyncio.create_task(self._open(link, instance, lease_id, state, prefill))
        lost: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()
        waiting = self._openings.setdefault(instance, set())
        waiting.add(lost)
        try:
            await first_done(opening, lost)
        except asyncio.CancelledError:
            self._abandon(opening)
            raise
        finally:
            waiting.discard(lost)
        if not opening.done():
            self._abandon(opening)
            raise lost.result()
        return opening.result()

    async def _open(
        self, link: DecodeWorkerLink, instance: str, lease_id: str, state: RequestState, prefill: bool
    ) -> WorkerLease:
        task = self._connecting.get(instance)
        if task is None or _over(task):
            connecting = WorkerSession.connect(link, instance, self.router, self.clock)
            task = self._connecting[instance] = asyncio.create_task(connecting, name=f"connect-{instance}")
        session = task.result() if task.done() else await asyncio.shield(task)
        if session.lost is not None:
            known = self._connecting.get(instance) is not task  # the worker has been suspected since, or is back
            raise WorkerLost(session.lost.message, code=OUT_OF_REACH if known else NEVER_SENT)
        return await session.open(lease_id, state, prefill=prefill)

    def _abandon(self, opening: asyncio.Task[WorkerLease]) -> None:
        """The lease is not wanted any more, be it granted meanwhile or not. Waits for nothing: it may be cancelled."""

        def close(done: asyncio.Task[WorkerLease]) -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().close()

        opening.cancel()
        opening.add_done_callback(close)

    def lose(self, instance: str, error: MillraceError) -> Coroutine[Any, Any, None] | None:
        """The worker is taken for dead: every request that waits for it, or holds a lease, is told `error`.

        What is left to be done is returned: a worker that does live must free what it holds for this router.
        """
        for lost in self._openings.pop(instance, ()):
            if not lost.done():
                lost.set_result(error)
        task = self._connecting.pop(instance, None)
        if task is not None and not task.done():
            task.cancel()
        elif task is not None and not task.cancelled() and task.exception() is None:
            session = task.result()
            session.lose(error)
            return session.close()
        return None

    async def close(self) -> None:
        for task in list(self._connecting.values()):
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            if isinstance(done[0], WorkerSession):
                await done[0].close()
        self._connecting.clear()


def _over(connecting: asyncio.Task[WorkerSession]) -> bool:
    """True if no session came of it, or one that has been lost since, be it while nobody held a lease in it."""
    if not connecting.done():
        return False
    return connecting.cancelled() or connecting.exception() is not None or connecting.result().lost is not None
