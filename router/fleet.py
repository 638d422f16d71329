"""The workers as the router can use them: who is there, the links and sessions to them, and what is open on each.

It counts what it opens: leases and prefill calls by worker. Which worker takes a request is decided in
router.placement. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.candidate import Candidate, Dispatched
from router.leases import OUT_OF_REACH, PrefillOnlyLease, RouterLease, Sessions, WorkerLease
from router.link_costs import LinkCosts
from router.policies import POLICIES
from router.pool_nodes import PoolNodes
from router.prefill_call import PrefillCall
from router.prefix_index import PrefixIndex
from router.registry import Registry, Reservation
from router.request_state import RequestState
from serving.errors import MillraceError, WorkerLost
from serving.links import AuditLink, DecodeWorkerLink, PrefillLink
from serving.messages import Audit, KVEvents, PoolReport, PrefillOrder, WorkerStatus
from serving.service_class import SERVICE_CLASSES, STANDARD, ServiceClass

log = logging.getLogger(__name__)

RECHECK_SECONDS = 0.25  # room may come free at a worker through another router: look again this often


class WorkerLink(DecodeWorkerLink, PrefillLink, AuditLink, Protocol):
    """Everything a router asks of a worker; a worker answers what its role allows."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """`patience`: seconds a request may wait for room or for a worker; `max_failures`: tries that may break.

    `policy` is one of router.policies.POLICIES. `prefix_index_bytes` bounds what the router remembers of the workers'
    KV blocks, for policies that need it. `strict_disaggregation`: no worker computes prompts for its own decodes.
    """

    name: str = "router"
    patience: float = 60.0
    max_waiting: int = 1024
    max_failures: int = 8
    silence: float = 5.0  # seconds without a heartbeat until a worker is taken for dead
    policy: str = "least_loaded"
    prefix_index_bytes: int = 64 << 20
    classes: Mapping[str, ServiceClass] = field(default_factory=lambda: SERVICE_CLASSES)
    default_class: str = STANDARD
    strict_disaggregation: bool = False


class Fleet:
    """`make_link` makes the link to a worker that has registered: gRPC, or the worker itself in process."""

    def __init__(
        self,
        config: RouterConfig,
        make_link: Callable[[WorkerStatus], WorkerLink],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.make_link = make_link
        self.clock = clock
        self.registry = Registry(config.silence)
        self.pool_nodes = PoolNodes(config.silence)
        self.prefixes = PrefixIndex(config.prefix_index_bytes) if POLICIES[config.policy].needs_prefixes else None
        self.refused: MillraceError | None = None  # set once no request may go on
        self._sessions = Sessions(config.name, clock)
        self._links: dict[str, WorkerLink] = {}
        self._prefills: dict[str, set[PrefillCall]] = {}  # in progress, by the worker's instance
        self._prefill_only: set[PrefillOnlyLease] = set()
        self.links = LinkCosts()
        self._counted: dict[str, Reservation] = {}  # by lease
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- membership --------------------------------------------------------------------------------------------

    def heartbeat(self, status: WorkerStatus, events: KVEvents | None = None) -> None:
        """A worker reports, and with it what its KV cache has gained and lost; requests that wait look again."""
        if self.registry.heartbeat(status, self.clock()):
            state = "leaving" if status.draining else "here"
            log.info("%s worker %s (%s) is %s", status.role, status.name, status.address, state)
        if self.prefixes is not None and events is not None:
            self.prefixes.apply(status.instance, events)
        self.notify()

    def kv_events_since(self, instance: str) -> int | None:
        """The first KV event to ask the worker for; None where KV events are not followed."""
        return None if self.prefixes is None else self.prefixes.since(instance)

    def pool_heartbeat(self, report: PoolReport) -> None:
        """A node of the KV pool reports. Requests do not wait for it: workers learn of it with their next heartbeat."""
        if self.pool_nodes.heartbeat(report, self.clock()):
            state = "leaving" if report.draining else "here"
            log.info("pool node %s (%s) is %s", report.stat.name, report.address, state)
            for address in self.pool_nodes.namesakes(report):
                log.warning(
                    "pool nodes at %s and %s are both named %s, so one of them is asked for nothing: give each a "
                    "--worker-name of its own",
                    *(report.address, address, report.stat.name),
                )

    def expire(self) -> None:
        """Take silent workers and pool nodes for dead; call about once a second."""
        for report in self.pool_nodes.expire(self.clock()):
            log.info(
                "pool node %s (%s) is %s", report.stat.name, report.address, "gone" if report.draining else "silent"
            )
        for instance in self.registry.expire(self.clock()):
            self.suspect(instance, WorkerLost("no heartbeat"))
        for instance in [known for known in self._links if self.registry.get(known) is None]:
            link = self._links.pop(instance)
            self._prefills.pop(instance, None)
            self._later(link.close())
        self.links.retain(self.registry.workers)
        if self.prefixes is not None:
            self.prefixes.retain(self.registry.workers)

    def suspect(self, instance: str, error: MillraceError) -> None:
        """A call to the worker broke: give it nothing until it reports again, and fail what it held."""
        entry = self.registry.get(instance)
        if entry is not None and not entry.suspect:
            log.warning("worker %s is out of reach: %s", entry.status.name, error.message)
        self.registry.suspect(instance)
        known = WorkerLost(error.message, code=OUT_OF_REACH)
        for call in list(self._prefills.get(instance, ())):
            call.lose(known)
        closing = self._sessions.lose(instance, known)
        if closing is not None:
            self._later(closing)

    def blame(self, instance: str, error: MillraceError) -> None:
        """A request has met this error there: suspect the worker, unless that is where the error comes from."""
        if error.code != OUT_OF_REACH:
            self.suspect(instance, error)

    def refuse_all(self, error: MillraceError) -> None:
        """The router is leaving and cannot wait: every request still here ends with this error."""
        self.refused = error
        for session in self._sessions.established():
            session.fail_all(error)
        for lease in list(self._prefill_only):
            lease.fail(error)
        self.notify()

    def notify(self) -> None:
        """Something changed that may make room."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until something changed, or a moment."""
        try:
            async with asyncio.timeout(RECHECK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return

    # ---- what is opened on workers -----------------------------------------------------------------------------

    async def open(self, worker: Candidate, lease_id: str, state: RequestState) -> WorkerLease:
        """A lease on the worker. Raises NoRoom, Draining, StaleLease, WorkerLost, InvalidRequest, Unauthorized."""
        status = worker.status
        reserved = self.reserve(worker, Dispatched(leases=1, context_tokens=state.tokens))
        try:
            lease = await self._sessions.open(self.link(status), status.instance, lease_id, state)
        except BaseException:
            reserved.release()
            raise
        self._counted[lease_id] = reserved
        return lease

    def reserve(self, worker: Candidate, work: Dispatched) -> Reservation:
        """Count the work towards the worker's load from now on. Release what this returns."""
        return Reservation(self.registry.get(worker.status.instance), work, self.clock)

    def prefill_only(self, lease_id: str) -> PrefillOnlyLease:
        lease = PrefillOnlyLease(lease_id)
        self._prefill_only.add(lease)
        return lease

    def close_lease(self, lease: RouterLease) -> None:
        """Call once for each lease."""
        if isinstance(lease, PrefillOnlyLease):
            self._prefill_only.discard(lease)
            self.notify()
            return
        counted = self._counted.pop(lease.fence.lease, None)
        if counted is not None:
            counted.release()
        lease.close()
        self.notify()

    def prefill(self, worker: Candidate, state: RequestState, lease: RouterLease, reserved: Reservation) -> PrefillCall:
        """A prefill into the lease; what is reserved for it is released when it ends."""
        running = self._prefills.setdefault(worker.status.instance, set())

        def ended() -> None:
            running.discard(call)
            reserved.release()

        order = PrefillOrder(order=state.order(lease.fence, self.clock()), grant=lease.grant)
        call = PrefillCall(self.link(worker.status), order, lease, ended)
        running.add(call)
        return call

    def link(self, status: WorkerStatus) -> WorkerLink:
        link = self._links.get(status.instance)
        if link is None:
            link = self._links[status.instance] = self.make_link(status)
        return link

    # ---- accounts ----------------------------------------------------------------------------------------------

    @property
    def open_leases(self) -> int:
        return sum(len(session.leases) for session in self._sessions.established())

    @property
    def prefill_only_leases(self) -> int:
        return len(self._prefill_only)

    @property
    def running_prefills(self) -> int:
        return sum(map(len, self._prefills.values()))

    async def audits(self) -> list[Audit]:
        """What every worker that can be reached says it holds."""
        found: list[Audit] = []
        for candidate in self.registry.candidates():
            try:
                found += await self.link(candidate.status).audit()
            except MillraceError as error:  # a worker that is slow to count may serve well: leave that to heartbeats
                log.warning("no audit of %s: %s", candidate.status.name, error.message)
        return found

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to its end beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await self._sessions.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            await link.close()
        self._links.clear()
