"""The workers as the router can use them: who is there, the links and sessions to them, and what is open on each.

It counts what it opens: leases and prefill calls by worker. Which worker takes a request the placer decides. No torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.breaker import BreakerConfig
from router.candidate import Candidate, Dispatched
from router.changes import Changes
from router.generations import pairs_of
from router.leases import DECODE_LOST, OUT_OF_REACH, PrefillOnlyLease, RouterLease, Sessions, WorkerLease
from router.link_costs import LinkCosts
from router.policies import POLICIES
from router.pool_nodes import PoolNodes
from router.prefill_call import BROKEN_CALL, PrefillCall
from router.prefix_index import PrefixIndex
from router.registry import Registry, Reservation, believable
from router.request_state import RequestState
from router.returning import Returning
from router.trust import Trust, Ways
from serving.errors import InvalidRequest, MillraceError, StaleLease, WorkerLost
from serving.links import AuditLink, DecodeWorkerLink, PrefillLink
from serving.messages import PROTOCOL, KVEvents, PoolReport, PrefillOrder, WorkerStatus
from serving.service_class import SERVICE_CLASSES, STANDARD, ServiceClass

log = logging.getLogger(__name__)

RECHECK_SECONDS = 0.25  # room may come free at a worker through another router: look again this often
STRANGERS = 100  # refused workers that the log tells of


class WorkerLink(DecodeWorkerLink, PrefillLink, AuditLink, Protocol):
    """Everything a router asks of a worker; a worker answers what its role allows."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """`patience`: seconds a request may wait for room or for a worker; `max_failures`: tries in a row that may break.

    After the second in a row that broke a request waits `retry_pause` seconds, then twice as long each time; those
    faster than `retries_per_second` wait once `retries_saved` are spent (router.retry_budget). A step of `stall`
    seconds is taken for a stuck engine, unless its worker's are long.
    `policy` is one of router.policies.POLICIES. `prefix_index_bytes` bounds what the router remembers of the workers'
    KV blocks, for policies that need it. `strict_disaggregation`: no worker computes prompts for its own decodes.
    """

    name: str = "router"
    patience: float = 60.0
    max_waiting: int = 1024
    max_failures: int = 8
    retry_pause: float = 0.1
    retries_per_second: float = 10.0
    retries_saved: float = 100.0
    silence: float = 5.0  # seconds without a heartbeat until a worker is taken for dead
    stall: float = 10.0
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
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
        self.trust = Trust(config.breaker, config.stall)
        self.breakers, self.links = self.trust.workers, self.trust.links
        self.worked: dict[tuple[str, str], float] = {}  # when a token last came all the way through a pair
        self._known: frozenset[str] = frozenset()  # instances, when pairs were last gone through
        self.returning = Returning()
        self.probing = 0  # leases that are tried or held for no request (router.canary)
        self._strangers: set[str] = set()  # names of workers of another protocol that the log has told of
        self.protocols_refused = 0  # heartbeats of workers of another protocol
        self.prefixes = PrefixIndex(config.prefix_index_bytes) if POLICIES[config.policy].needs_prefixes else None
        self.refused: MillraceError | None = None  # set once no request may go on
        self.link_costs = LinkCosts()
        self.ways = Ways(self.trust, self.link_costs)
        self.sessions = Sessions(config.name, clock)
        self._worker_links: dict[str, WorkerLink] = {}
        self._prefills: dict[str, set[PrefillCall]] = {}  # in progress, by the worker's instance
        self._prefill_only: set[PrefillOnlyLease] = set()
        self._counted: dict[str, Reservation] = {}  # by lease
        self._listened: float | None = None  # when it last heard a worker, or looked for silent ones
        self.changes = Changes(RECHECK_SECONDS)  # that may have made room
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- membership --------------------------------------------------------------------------------------------

    def heartbeat(self, status: WorkerStatus, events: KVEvents | None = None, *, made_at: float | None = None) -> None:
        """A worker reports, and with it what its KV cache has gained and lost; requests that wait look again.

        `made_at`: when it did, on this router's clock; now, where that is not known. Raises InvalidRequest.
        """
        self.check_protocol(status.name, status.protocol)
        now = self._listen()
        status = believable(status)
        if self.registry.heartbeat(status, now, made_at=made_at):
            state = "leaving" if status.draining else "here"
            log.info("%s worker %s (%s) is %s", status.role, status.name, status.address, state)
        if self.trust.heard(status, now):
            log.warning("worker %s does not get on with its work: it is given no more until it does", status.name)
            self._relieve_stuck()
        if self.returning.heard(status):
            self._forget()
        if self.prefixes is not None and events is not None:
            self.prefixes.apply(status.instance, events)
        self.notify()

    def check_protocol(self, name: str, protocol: int) -> None:
        """Raises InvalidRequest for a worker that speaks neither this version of the protocol nor the one before."""
        if protocol not in (PROTOCOL, PROTOCOL - 1):
            self.protocols_refused += 1
            told = f"worker {name} speaks protocol {protocol} and this router {PROTOCOL}"
            error = f"{told}: run the same version of millrace on both, and upgrade routers first"
            if name not in self._strangers and len(self._strangers) < STRANGERS:
                self._strangers.add(name)
                log.warning("refused: %s", error)
            raise InvalidRequest(error, param="protocol", code="protocol")

    def kv_events_since(self, instance: str) -> int | None:
        """The first KV event to ask the worker for; None where KV events are not followed."""
        return None if self.prefixes is None else self.prefixes.since(instance)

    def pool_heartbeat(self, report: PoolReport) -> None:
        """A node of the KV pool reports. Requests do not wait for it: workers learn of it with their next heartbeat."""
        if self.pool_nodes.heartbeat(report, self._listen()):
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
        now = self._listen()
        for report in self.pool_nodes.expire(now):
            state = "gone" if report.draining else "silent"
            log.info("pool node %s (%s) is %s", report.stat.name, report.address, state)
        for instance in self.registry.expire(now):
            self.suspect(instance, WorkerLost("no heartbeat"))
        self._relieve_stuck()
        self.trust.retain(self.registry.workers, now)
        for instance, slow in self.trust.slowness.judge(now):
            self.registry.mark_slow(instance, slow)
            log.warning("worker %s is %s", self.name(instance), self.trust.slowness.told(instance))
        for instance in [known for known in self._worker_links if self.registry.get(known) is None]:
            link = self._worker_links.pop(instance)
            self._prefills.pop(instance, None)
            self._later(self.sessions.lose(instance, WorkerLost("the worker is gone")))
            self._later(link.close())
        self._forget()

    def _forget(self) -> None:
        """What is known of workers that are gone."""
        known = frozenset(self.registry.workers).union(self.returning.instances(self.clock()))
        if known != self._known:  # there are as many pairs as workers squared
            self._known = known
            self.worked = {pair: at for pair, at in self.worked.items() if known.issuperset(pair)}
            self.link_costs.retain(known)
        if self.prefixes is not None:
            self.prefixes.retain(known)

    def _listen(self) -> float:
        """Now. A router that was paused, or too busy to listen, first gives everybody time to be heard."""
        now, before = self.clock(), self._listened
        self._listened = now
        if before is not None and now - before > self.config.silence / 2:
            log.warning("the router has not listened for %.1f s: nobody's silence meanwhile counts", now - before)
            self.registry.excuse(now)
            self.pool_nodes.excuse(now)
        return now

    def candidates(self) -> Sequence[Candidate]:
        """Workers that may be given work: heard of, reached, and not stuck. Not to be changed."""
        stuck, found = self.trust.stalls.all_stuck(), self.registry.candidates()
        return [each for each in found if each.status.instance not in stuck] if stuck else found

    def pairs(self) -> Iterator[tuple[Candidate, Candidate]]:
        """The workers within reach that requests may be prefilled and decoded by."""
        return pairs_of(self.registry.candidates())

    @property
    def all_well(self) -> bool:
        """True if nothing is held against any worker or way. Pairs are as many as workers squared: ask this first."""
        troubled = self.trust.stalls.all_stuck() or any(entry.suspect for entry in self.registry.workers.values())
        return self.trust.untroubled and not troubled

    def pair_health(self) -> dict[tuple[str, str], bool]:
        """Every pair by the names of its prefill and decode worker: True if nothing is held against it."""
        known = self.registry.workers
        ill = {name for name, entry in known.items() if entry.suspect or not self.trust.well(name)}
        barred = self.links.barred()
        return {
            (prefill.status.name, decode.status.name): not (
                prefill.status.instance in ill
                or decode.status.instance in ill
                or (prefill.status.instance, decode.status.instance) in barred
            )
            for prefill, decode in pairs_of([Candidate(entry.status) for entry in known.values()])
        }

    def _relieve_stuck(self) -> None:
        """What stuck workers hold goes elsewhere, where there is an elsewhere."""
        for stuck in self.registry.candidates():
            instance = stuck.status.instance
            if self.trust.stalls.stuck(instance) and self._holds(instance):
                self.relieve(stuck, WorkerLost(f"the engine of {stuck.status.name} is stuck"))

    def relieve(self, worker: Candidate, error: MillraceError) -> None:
        """What the worker holds goes elsewhere, where there is an elsewhere."""
        if self.trust.replaceable(worker, self.candidates()):
            self.suspect(worker.status.instance, error)

    def _holds(self, instance: str) -> bool:
        """True if requests of this router are there."""
        return bool(self._prefills.get(instance)) or any(lease.fence.instance == instance for lease in self._leases())

    def suspect(self, instance: str, error: MillraceError) -> None:
        """A call to the worker broke: give it nothing until it reports again, and fail what it held."""
        entry = self.registry.get(instance)
        if entry is not None and not entry.suspect:
            log.warning("worker %s is out of reach: %s", entry.status.name, error.message)
        self.registry.suspect(instance)
        self.breakers.failed(instance, self.clock())
        known = WorkerLost(error.message, code=OUT_OF_REACH)
        for call in list(self._prefills.get(instance, ())):
            call.lose(known)
        self._later(self.sessions.lose(instance, known))

    def blame(self, instance: str, error: MillraceError) -> None:
        """A request has met this error there: suspect the worker, unless that is where the error comes from.

        Nor where the call broke on this side: an order that cannot be sent would make every worker suspect in turn.
        """
        if error.code not in (OUT_OF_REACH, BROKEN_CALL):
            self.suspect(instance, error)

    def blame_link(self, prefill: str, decode: str, error: MillraceError) -> None:
        """KV did not get from one to the other: give the pair nothing for a while."""
        if self.links.failed(prefill, decode, self.clock()):
            ends = " to ".join(self.name(instance) for instance in (prefill, decode))
            log.warning("the way from %s is left alone for a while: %s", ends, error.message)

    def interrupt_handoffs(self, prefill: str, decode: str) -> None:
        """Nothing gets from one to the other: requests whose KV is on its way need not wait to be told."""
        for call in list(self._prefills.get(prefill, ())):
            if call.handing_over and call.lease.fence.instance == decode:
                call.lose(StaleLease("the canary did not get through either", code=DECODE_LOST))

    def lost_lease(self, instance: str, error: MillraceError) -> None:
        """A decode worker has lost a lease: give it less trust, unless that is where the error comes from."""
        if error.code != OUT_OF_REACH:
            self.breakers.failed(instance, self.clock())

    def decoded(self, prefill: str, decode: str) -> None:
        """A token has come all the way: prefilled there, handed over, decoded here."""
        now = self.clock()
        self.worked[prefill, decode] = now
        self.links.succeeded(prefill, decode, now)
        self.breakers.succeeded(decode, now)

    def name(self, instance: str) -> str:
        """The worker's name; of one that is gone, its instance."""
        entry = self.registry.get(instance)
        return entry.status.name if entry is not None else instance

    def refuse_all(self, error: MillraceError) -> None:
        """The router is leaving and cannot wait: every request still here ends with this error."""
        self.refused = error
        for session in self.sessions.established():
            session.fail_all(error)
        for lease in list(self._prefill_only):
            lease.fail(error)
        self.notify()

    def notify(self) -> None:
        """Something changed that may make room."""
        self.changes.notify()

    async def change(self) -> None:
        """Wait until something changed, or a moment."""
        await self.changes.next()

    # ---- what is opened on workers -----------------------------------------------------------------------------

    async def open(self, worker: Candidate, lease_id: str, state: RequestState, prefill: bool = False) -> WorkerLease:
        """A lease on the worker, which with `prefill` computes the prompt at once. Raises as DecodeSession.open."""
        status = worker.status
        self.breakers.begin(status.instance, self.clock())
        reserved = self.reserve(worker, Dispatched(leases=1, context_tokens=state.tokens))
        try:
            lease = await self.sessions.open(self.link(status), status.instance, lease_id, state, prefill=prefill)
        except BaseException:
            reserved.release()
            raise
        self._counted[lease_id] = reserved
        return lease

    def reserve(self, worker: Candidate, work: Dispatched, turn: tuple[int, float] | None = None) -> Reservation:
        """Count the work towards the worker's load from now on. Release what this returns."""
        return Reservation(self.registry.get(worker.status.instance), work, self.clock, turn)

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
        instance = worker.status.instance
        running = self._prefills.setdefault(instance, set())

        def ended(call: PrefillCall) -> None:
            running.discard(call)
            reserved.release(computed=call.computed)

        if instance != lease.fence.instance:
            self.breakers.begin(instance, self.clock())
            self.links.begin(instance, lease.fence.instance, self.clock())
        order = PrefillOrder(order=state.order(lease.fence, self.clock()), grant=lease.grant)
        call = PrefillCall(self.link(worker.status), order, lease, ended)
        running.add(call)
        return call

    def link(self, status: WorkerStatus) -> WorkerLink:
        link = self._worker_links.get(status.instance)
        if link is None:
            link = self._worker_links[status.instance] = self.make_link(status)
        return link

    # ---- accounts ----------------------------------------------------------------------------------------------

    @property
    def open_leases(self) -> int:
        return len(self._leases())

    def _leases(self) -> list[WorkerLease]:
        return [lease for session in self.sessions.established() for lease in session.leases.values()]

    @property
    def prefill_only_leases(self) -> int:
        return len(self._prefill_only)

    @property
    def running_prefills(self) -> int:
        return sum(map(len, self._prefills.values()))

    def _later(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Run to its end beside everything else, if there is something."""
        if work is not None:
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await self.sessions.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._worker_links.values():
            await link.close()
        self._worker_links.clear()
