"""The router's sessions, one with each decode worker it has leases on, and the leases in them.

A session is begun with the first lease. Its end, from either side, ends all its leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from router.leases import WorkerLease, WorkerSession
from router.request_state import RequestState
from serving.errors import MillraceError, WorkerLost
from serving.links import DecodeWorkerLink

OUT_OF_REACH = "out_of_reach"  # an error that repeats what is known: its worker is suspect, or was until just now


class Sessions:
    """All of a router's sessions by worker instance. `router` is the name it introduces itself with."""

    def __init__(self, router: str):
        self.router = router
        self._connecting: dict[str, asyncio.Task[WorkerSession]] = {}  # and the sessions that came of it
        self._openings: dict[str, set[asyncio.Future[MillraceError]]] = {}  # requests that wait for a worker's answer

    def established(self) -> list[WorkerSession]:
        done = [task for task in self._connecting.values() if task.done() and not task.cancelled()]
        return [task.result() for task in done if task.exception() is None]

    async def open(self, link: DecodeWorkerLink, instance: str, lease_id: str, state: RequestState) -> WorkerLease:
        """A lease on the worker behind `link`, in the session with it. Raises what the worker answers, or WorkerLost.

        WorkerLost comes as soon as the worker is taken for dead, even if it never answers.
        """
        opening = asyncio.create_task(self._open(link, instance, lease_id, state))
        lost: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()
        waiting = self._openings.setdefault(instance, set())
        waiting.add(lost)
        either: list[asyncio.Future[Any]] = [opening, lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._abandon(opening)
            raise
        finally:
            waiting.discard(lost)
        if not opening.done():
            self._abandon(opening)
            raise lost.result()
        return opening.result()

    async def _open(self, link: DecodeWorkerLink, instance: str, lease_id: str, state: RequestState) -> WorkerLease:
        task = self._connecting.get(instance)
        if task is None:
            connecting = WorkerSession.connect(link, instance, self.router)
            task = self._connecting[instance] = asyncio.create_task(connecting, name=f"connect-{instance}")
        session = await asyncio.shield(task)
        if session.lost is not None:
            known = self._connecting.get(instance) is not task  # the worker has been suspected since, or is back
            raise WorkerLost(session.lost.message, code=OUT_OF_REACH if known else None)
        return await session.open(lease_id, state)

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
