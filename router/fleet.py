"""The workers as the router can use them: links, sessions, leases with room, and the wait for any of it.

The registry knows who is there and the policy who is best; this tries them in that order. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from router.admission import CONTINUATION, NEW, AdmissionQueue
from router.leases import NoLease, RouterLease, WorkerSession
from router.policy import Candidate, LeastLoaded, outgrown
from router.pool_nodes import PoolNodes
from router.prefill_call import PrefillCall
from router.registry import Registry
from serving.errors import (
    Draining,
    MillraceError,
    NoRoom,
    Overloaded,
    StaleLease,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from serving.links import AuditLink, DecodeWorkerLink, PrefillLink
from serving.messages import Audit, Build, PoolReport, Request, WorkerStatus

log = logging.getLogger(__name__)

OUT_OF_REACH = "out_of_reach"  # an error that only repeats what is known: its worker is suspect, or was until just now
RECHECK_SECONDS = 0.25  # room may come free at a worker through another router: look again this often


class WorkerLink(DecodeWorkerLink, PrefillLink, AuditLink, Protocol):
    """Everything a router asks of a worker; a worker answers what its role allows."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """`patience`: seconds a request may wait for room or for a worker; `max_failures`: tries that may break."""

    name: str = "router"
    patience: float = 60.0
    max_waiting: int = 1024
    max_failures: int = 8
    silence: float = 5.0  # seconds without a heartbeat until a worker is taken for dead


class Fleet:
    """`make_link` makes the link to a worker that has registered: gRPC, or the worker itself in process."""

    def __init__(
        self,
        config: RouterConfig,
        make_link: Callable[[WorkerStatus], WorkerLink],
        policy: LeastLoaded,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.make_link = make_link
        self.policy = policy
        self.clock = clock
        self.registry = Registry(config.silence)
        self.pools = PoolNodes(config.silence)
        self.admission = AdmissionQueue(config.max_waiting)
        self._links: dict[str, WorkerLink] = {}
        self._sessions: dict[str, asyncio.Task[WorkerSession]] = {}
        self._changed = asyncio.Event()
        self.prefills: dict[str, set[PrefillCall]] = {}  # prefill calls in progress, by the worker's instance
        self._openings: dict[str, set[asyncio.Future[MillraceError]]] = {}  # who waits for a worker's answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._lease_count = 0
        self._unleased: set[NoLease] = set()  # what stands in for the leases of single-token requests
        self._full = False  # whether the last look for a place found workers, but none with room
        self.refused: MillraceError | None = None  # set once no request may go on

    # ---- what is heard -----------------------------------------------------------------------------------------

    def heartbeat(self, status: WorkerStatus) -> None:
        """A worker reports; whoever waits for room looks again."""
        if self.registry.heartbeat(status, self.clock()):
            log.info(
                "%s worker %s (%s) is %s",
                status.role,
                status.name,
                status.address,
                "leaving" if status.draining else "here",
            )
        self.notify()

    def pool_heartbeat(self, report: PoolReport) -> None:
        """A node of the KV pool reports. Requests do not wait for it: workers hear of it with their next heartbeat."""
        if self.pools.heartbeat(report, self.clock()):
            state = "leaving" if report.draining else "here"
            log.info("pool node %s (%s) is %s", report.stat.name, report.address, state)
            for address in self.pools.namesakes(report):
                log.warning(
                    "pool nodes at %s and %s are both named %s, so one of them is asked for nothing: give each a "
                    "--worker-name of its own",
                    *(report.address, address, report.stat.name),
                )

    def expire(self) -> None:
        """Take silent workers and pool nodes for dead; call about once a second."""
        for report in self.pools.expire(self.clock()):
            log.info(
                "pool node %s (%s) is %s", report.stat.name, report.address, "gone" if report.draining else "silent"
            )
        for instance in self.registry.expire(self.clock()):
            self.suspect(instance, WorkerLost("no heartbeat"))
        for instance in [known for known in self._links if self.registry.get(known) is None]:
            link = self._links.pop(instance)
            self.prefills.pop(instance, None)
            self._later(link.close())

    def suspect(self, instance: str, error: MillraceError) -> None:
        """A call to the worker broke: give it nothing until it reports again, and fail the leases it held."""
        entry = self.registry.get(instance)
        if entry is not None and not entry.suspect:
            log.warning("worker %s is out of reach: %s", entry.status.name, error.message)
        self.registry.suspect(instance)
        known = WorkerLost(error.message, code=OUT_OF_REACH)
        for lost in self._openings.pop(instance, ()):
            if not lost.done():
                lost.set_result(known)
        for run in list(self.prefills.get(instance, ())):
            run.lose(known)
        task = self._sessions.pop(instance, None)
        if task is not None and not task.done():
            task.cancel()
        elif task is not None and not task.cancelled() and task.exception() is None:
            session = task.result()
            session.lose(known)
            self._later(session.close())  # if it does live, it must free what it holds for us

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to its end beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def blame(self, instance: str, error: MillraceError) -> None:
        """A request has met this error there: suspect the worker, unless that is where the error comes from."""
        if error.code != OUT_OF_REACH:
            self.suspect(instance, error)

    def refuse_all(self, error: MillraceError) -> None:
        """The router is leaving and cannot wait: every request still here ends with this error."""
        self.refused = error
        for task in self._sessions.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                for lease in list(task.result().leases.values()):
                    lease.fail(error)
        for without in list(self._unleased):
            without.fail(error)
        self.notify()

    def notify(self) -> None:
        """Something changed that may make room."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- leases ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(
        self, request: Request, generated: Sequence[int], build: Build | None
    ) -> AsyncIterator[RouterLease | NoLease]:
        """Room on the best decode worker that has it; closed, everywhere, when left.

        With a `build`, only on workers of that: a text begun by one is not gone on with by another.

        Raises Overloaded or Unavailable once patience is over, InvalidRequest, ContextLengthExceeded.
        """
        self._lease_count += 1
        lease_id = f"{request.request_id}/{self._lease_count}"
        if request.sampling.max_tokens - len(generated) == 1 and not self._outgrown(request, generated, build):
            without = NoLease(lease_id, build)
            self._unleased.add(without)
            try:
                yield without
            finally:
                self._unleased.discard(without)
            return
        lease = await self._place(lease_id, request, generated, build)
        entry = self.registry.get(lease.fence.instance)
        if entry is not None:
            entry.leases += 1
        try:
            yield lease
        finally:
            if entry is not None:
                entry.leases -= 1
            lease.worker.close_lease(lease)
            self.notify()

    async def _place(
        self, lease_id: str, request: Request, generated: Sequence[int], build: Build | None
    ) -> RouterLease:
        try:
            async with asyncio.timeout(self._patience(request)):
                async with self.admission.turn(CONTINUATION if generated else NEW):
                    while True:
                        if self.refused is not None:
                            raise self.refused
                        lease, self._full = await self._try_all(lease_id, request, generated, build)
                        if lease is not None:
                            return lease
                        await self.change()
        except TimeoutError:
            if self._full:
                raise Overloaded(
                    f"no decode worker had room within {self.config.patience:g} s", code="no_room", retry_after=1.0
                ) from None
            raise Unavailable("no decode worker is ready; start one, or look at /health", retry_after=2.0) from None

    async def _try_all(
        self, lease_id: str, request: Request, generated: Sequence[int], build: Build | None
    ) -> tuple[RouterLease | None, bool]:
        """A lease on the first worker that grants one, and whether some were full."""
        full, tokens = False, len(request.prompt) + len(generated)
        fingerprint = build.fingerprint if build is not None else None
        for candidate in self.policy.decode_order(tokens, self.registry.candidates(), fingerprint):
            instance = candidate.status.instance
            try:
                lease = await self._unless_lost(instance, self._open(candidate.status, lease_id, request, generated))
                lease.build = Build(candidate.status.fingerprint, candidate.status.pairing)
                return lease, False
            except NoRoom:
                full = True
            except Draining:
                continue  # its heartbeat will say so
            except (WorkerLost, StaleLease, Unauthorized) as error:  # gone, another life by now, or none of ours
                self.blame(instance, error)
        return None, full

    async def _open(
        self, status: WorkerStatus, lease_id: str, request: Request, generated: Sequence[int]
    ) -> RouterLease:
        session = await self._session(status)
        return await session.open(lease_id, request, generated)

    async def _unless_lost(self, instance: str, opening: Coroutine[Any, Any, RouterLease]) -> RouterLease:
        """Wait for a worker's answer, but not for that of one which is taken for dead meanwhile (WorkerLost)."""
        task = asyncio.create_task(opening)
        lost: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()
        waiting = self._openings.setdefault(instance, set())
        waiting.add(lost)
        either: list[asyncio.Future[Any]] = [task, lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        finally:
            waiting.discard(lost)
        if not task.done():
            self._abandon(task)
            raise lost.result()
        return task.result()

    def _abandon(self, opening: asyncio.Task[RouterLease]) -> None:
        """Nobody wants the lease any more, be it granted meanwhile or not. Waits for nothing: we may be cancelled."""

        def close(done: asyncio.Task[RouterLease]) -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().worker.close_lease(done.result())

        opening.cancel()
        opening.add_done_callback(close)

    def _patience(self, request: Request) -> float:
        if request.deadline is None:
            return self.config.patience
        return max(0.0, min(self.config.patience, request.deadline - self.clock()))

    async def change(self) -> None:
        """Wait until something changed, or a moment."""
        try:
            async with asyncio.timeout(RECHECK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _session(self, status: WorkerStatus) -> WorkerSession:
        """The session with a worker, begun when first needed. Raises WorkerLost."""
        task = self._sessions.get(status.instance)
        if task is None:
            connecting = WorkerSession.connect(self.link(status), status.instance, self.config.name)
            task = asyncio.create_task(connecting, name=f"connect-{status.name}")
            self._sessions[status.instance] = task
        session = await asyncio.shield(task)
        if session.lost is None:
            return session
        if self._sessions.get(status.instance) is task:
            self.suspect(status.instance, session.lost)
        raise WorkerLost(session.lost.message, code=OUT_OF_REACH)

    # ---- prefill -----------------------------------------------------------------------------------------------

    async def prefill_worker(
        self, request: Request, generated: Sequence[int], lease: RouterLease | NoLease, avoid: set[str]
    ) -> Candidate:
        """The best worker to prefill for this lease; waits for one. Raises Unavailable, or what ends the lease."""
        instance, tokens = lease.fence.instance, len(request.prompt) + len(generated)
        pairing = lease.build.pairing if lease.build is not None else None
        try:
            async with asyncio.timeout(self._patience(request)):
                while True:
                    found = self._best_prefill(tokens, instance, pairing, avoid, begun=bool(generated))
                    if found is not None:
                        return found
                    if lease.failed.done():
                        raise lease.failed.result()
                    avoid.clear()  # better one that failed before than none
                    await self.change()
        except TimeoutError:
            raise Unavailable("no prefill worker is ready; start one, or look at /health", retry_after=2.0) from None

    def _best_prefill(
        self, tokens: int, instance: str, pairing: str | None, avoid: set[str], *, begun: bool
    ) -> Candidate | None:
        """The decode worker itself where it can prefill too, else the policy's choice among its equals.

        Even while that one drains: who granted a lease computes its prompt before it leaves (prefill.worker). A text
        that has `begun`, and has outgrown all who prefill, is computed by the decode worker whatever its role.
        """
        candidates = self.registry.candidates()
        order = self.policy.prefill_order(tokens, candidates, pairing, avoid)
        last_resort = begun and outgrown(tokens, order)
        for candidate in candidates:
            own = candidate.status.instance == instance and instance not in avoid
            if own and (candidate.prefills or last_resort):
                return candidate
        return order[0] if order else None

    def _outgrown(self, request: Request, generated: Sequence[int], build: Build | None) -> bool:
        """Whether a text has begun that nobody who prefills could go on with."""
        tokens, pairing = len(request.prompt) + len(generated), build.pairing if build is not None else None
        return bool(generated) and outgrown(
            tokens, self.policy.prefill_order(tokens, self.registry.candidates(), pairing, ())
        )

    def link(self, status: WorkerStatus) -> WorkerLink:
        link = self._links.get(status.instance)
        if link is None:
            link = self._links[status.instance] = self.make_link(status)
        return link

    # ---- accounts ----------------------------------------------------------------------------------------------

    def open_leases(self) -> int:
        sessions = [task for task in self._sessions.values() if task.done() and not task.cancelled()]
        return sum(len(task.result().leases) for task in sessions if task.exception() is None)

    async def audits(self) -> list[Audit]:
        """What every worker that can be reached says it holds."""
        found: list[Audit] = []
        for candidate in self.registry.candidates():
            try:
                found += await self.link(candidate.status).audit()
            except MillraceError as error:  # a worker that is slow to count may serve well: leave that to heartbeats
                log.warning("no audit of %s: %s", candidate.status.name, error.message)
        return found

    async def close(self) -> None:
        for task in list(self._sessions.values()):
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            if isinstance(done[0], WorkerSession):
                await done[0].close()
        self._sessions.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            await link.close()
        self._links.clear()
