"""The decode worker: opens leases, takes KV in, runs the batch, and sends each router its new tokens once a step.

A thin shell around pure parts: the lease table says what may happen, the scheduler what runs, the KV manager which
blocks; here they are called under the engine's lock. It knows neither prefill workers nor gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from decode.deadlines import Deadlines
from decode.direct import DirectLeases
from decode.lease_events import LeaseEvents, untold
from decode.leases import Lease, LeaseTable
from decode.room import DecodeRoom
from decode.scheduler import DecodeScheduler
from decode.tpot_bound import LeaseBound, Unbound
from decode.traces import DecodeTraces
from kvcache.connector.direct_fetch import DirectFetcher
from kvcache.handoff.chunk import Chunk, Commit, packed, split, verify, verify_commit
from kvcache.handoff.local import LOCAL
from kvcache.memory.device import token_bytes
from kvcache.memory.kv_dtype import is_lossy
from kvcache.memory.locations import KVLocation
from kvcache.transfer.lent_memory import MemoryLenders
from kvcache.worker_context import WorkerContext
from serving.engine.objectives import DEADLINE_PASSED
from serving.engine.sequence import SequenceOutput, SequenceState, of_crash
from serving.errors import DeadlineExceeded, Draining, MillraceError, Preempted, Retryable, StaleLease
from serving.links import Deliver, LeaseEvent
from serving.messages import LeaseGrant, LeaseId, LeaseOrder

log = logging.getLogger(__name__)


class DecodeWorker:
    """See the module. `address` is what leases are granted with: where KV is to be pushed.

    `lenders` are offered beside the address: memory that handoffs may write to. `direct` brings prefixes straight from
    the KV pool. New leases leave as many blocks as are `wanted`: for a prompt that is computed here for another worker.
    `bound` says which leases would slow the others down too much.
    """

    def __init__(
        self,
        context: WorkerContext,
        scheduler: DecodeScheduler,
        address: str,
        *,
        lenders: MemoryLenders | None = None,
        direct: DirectFetcher | None = None,
        wanted: Callable[[], int] = lambda: 0,
        bound: LeaseBound | None = None,
    ):
        self.context = context
        self.identity = context.identity
        self.loop = context.loop
        self.engine = context.engine
        self.kv = context.kv
        self.device_kv = context.device_kv
        self.scheduler = scheduler
        self.address = address
        self.lenders = lenders or MemoryLenders()
        self.table = LeaseTable(self.identity.instance, len(self.device_kv.specs))
        self.room = DecodeRoom(context, self.table, bound or Unbound(), wanted, self._give_way)
        self.direct = DirectLeases(self.table, self.engine.lock, direct, context.identity.name)
        self.deadlines = Deadlines(self._expire)
        self.traces = DecodeTraces(context.identity.name)
        self.sessions: dict[str, RouterSession] = {}
        self.draining = False
        self.receiving = 0  # handoffs in progress
        self.expired = 0  # leases ended because their deadline had passed
        self.refused: Counter[str] = Counter()  # KV chunks and commits refused, by reason
        self.mixed_pairs = 0  # handoffs refused because the sender was of another generation
        self.received: Counter[str] = Counter()  # bytes of KV taken in, by transport
        self.handoffs: Counter[str] = Counter()  # handoffs committed, by transport
        self._session_count = 0
        self._idle = asyncio.Event()

    # ---- leases ------------------------------------------------------------------------------------------------

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> RouterSession:
        """Start a session for a router; `lost` is never called in process."""
        self._session_count += 1
        session = RouterSession(self, f"{router}#{self._session_count}", deliver)
        self.sessions[session.name] = session
        return session

    def open(self, order: LeaseOrder, session: str) -> LeaseGrant:
        """Hold room for the order's tokens. Raises Draining, NoRoom, StaleLease, InvalidRequest, DeadlineExceeded."""
        if self.draining:
            raise Draining(f"{self.identity.name} is draining")
        with self.engine.lock:
            self.table.check_new(order)
            seq = self.room.hold_new(order, session)
            try:
                lease = self.table.open(order, session, seq)
            except BaseException:
                self.kv.release(seq)
                raise
            self.room.turns.settled(session)
            self.deadlines.watch(order.lease.lease, order.ends_in)
            return self._grant(lease)

    def advance(self, order: LeaseOrder, session: str) -> LeaseGrant:
        """Begin the session's lease anew for another prefill try. When it raises, the session holds it no more."""
        with self.engine.lock:
            lease = self.table.held(order.lease.lease, session)
            if lease is None:
                raise StaleLease(f"lease {order.lease.lease} is not open here", code="lease")
            self.engine.end(lease.seq)
            self.traces.end(order.lease.lease, lease.seq)
            self.direct.stop(order.lease.lease)
            try:
                lease = self._begin_anew(order)
            except BaseException:
                self.end(order.lease.lease)
                raise
            self.deadlines.watch(order.lease.lease, order.ends_in)
            self.loop.wake()
            return self._grant(lease)

    def _begin_anew(self, order: LeaseOrder) -> Lease:
        seq = self.room.hold(order)
        try:
            return self.table.advance(order, seq)
        except BaseException:
            self.kv.release(seq)
            raise

    def end(self, lease_id: str) -> None:
        """Forget the lease and free its blocks within a step. Safe to repeat."""
        with self.engine.lock:
            lease = self.table.end(lease_id)
            if lease is not None:
                self.engine.end(lease.seq)
                self.traces.end(lease_id, lease.seq)
                self.room.bound.ended(lease.seq, self.engine.clock())
                self.direct.stop(lease_id)
        self.deadlines.forget(lease_id)
        self._note_idle()
        self.loop.wake()

    def _expire(self, lease_id: str) -> None:
        """Its deadline has passed: nothing more is taken in or computed for it."""
        lease = self.table.leases.get(lease_id)
        if lease is not None:
            self.expired += 1
            self.deliver([SequenceOutput(lease.seq, error=DeadlineExceeded(DEADLINE_PASSED))])

    def _give_way(self, leases: Sequence[Lease]) -> None:
        """Others get their room. Their routers look for another place for them."""
        late = Preempted("its first token was late, and others got its room")
        self.deliver([SequenceOutput(lease.seq, error=late) for lease in leases])

    def _grant(self, lease: Lease) -> LeaseGrant:
        return LeaseGrant(
            lease=lease.fence,
            cached_tokens=lease.seq.computed,
            address=self.address,
            kv_dtype=self.identity.kv_dtype,
            transports=self.lenders.offers,
        )

    # ---- KV in -------------------------------------------------------------------------------------------------

    async def begin(self, fence: LeaseId | None, generation: str) -> int:
        """The first token to hand over: those before it are here, or come from the KV pool; 0 where none do.

        Raises StaleLease where the sender is of another generation, and counts it: routers pair no two such workers.
        """
        if generation != self.identity.generation:
            self.mixed_pairs += 1
            error = StaleLease(f"{self.identity.name} takes no KV of another generation", code="generation")
            self._refuse(error, fence)
            raise error
        return await self.direct.begin(fence) if fence is not None else 0

    async def receive(self, chunk: Chunk, via: str = LOCAL) -> None:
        """Check a chunk and write it into its lease's blocks. Raises CorruptChunk, StaleLease."""
        await asyncio.to_thread(self._receive, chunk)
        self.received[via] += len(chunk.payload)

    def _receive(self, chunk: Chunk) -> None:
        try:
            if chunk.layout != self.identity.fingerprint:
                raise StaleLease("KV of another model or layout", code="layout")
            verify(chunk, self.device_kv)
            layers, there = range(chunk.first_layer, chunk.last_layer), packed(chunk, self.device_kv.specs)
            parts = split(chunk, self.device_kv) if there is None else None
            with self._writing(chunk) as locations:
                if there is None or not self.context.locations.unpack(locations, layers, there):
                    self.context.locations.write(locations, layers, parts or split(chunk, self.device_kv))
        except Retryable as error:
            self._refuse(error, chunk.lease)
            raise

    @contextmanager
    def _writing(self, chunk: Chunk) -> Iterator[list[KVLocation]]:
        """Where to write the chunk, without the lock: its lease may end meanwhile, its blocks are held."""
        with self.engine.lock:
            lease = self.table.check(chunk.lease)
            lease.accept(chunk.first_layer, chunk.last_layer, chunk.start, chunk.end)
            self.kv.settle(lease.seq)
            locations = self.context.locations.arriving(lease.seq, chunk.start, chunk.end)
            kept = self.kv.keep(lease.seq, chunk.start, chunk.end)
        written = False
        try:
            yield locations
            written = True
        finally:
            with self.engine.lock:
                if self.kv.let_go(kept):
                    self.loop.wake(hurry=False)
                lease.over(chunk.first_layer, chunk.last_layer)
                if written and self.table.check(chunk.lease) is lease:
                    lease.fill(chunk.first_layer, chunk.last_layer, chunk.end)
                    lease.seq.incoming.lossy |= is_lossy(chunk.encoding)
                    stored = self.device_kv.specs[chunk.first_layer : chunk.last_layer]
                    lease.meter.came((chunk.end - chunk.start) * token_bytes(stored), self.engine.clock())

    async def commit(self, commit: Commit, via: str = LOCAL) -> range | None:
        """All KV is handed over: the lease joins the batch after its first token. Raises CorruptChunk, StaleLease.

        Tokens that were to come from the KV pool and did not are returned instead: hand them over and commit again.
        """
        fence, drawn_at = commit.lease, self.engine.clock() - commit.age
        try:
            verify_commit(commit)
            if lacking := await self.direct.settle(fence):
                return lacking
            with self.engine.lock:
                lease = self.table.commit(fence)
                seq = lease.seq
                seq.computed = len(seq.tokens)
                self.kv.publish(seq)
                seq.tokens.append(commit.first_token)
                seq.incoming.drawn_at = drawn_at
                self.scheduler.add(seq)
        except Retryable as error:
            self._refuse(error, fence)
            raise
        self.direct.handed_over(lease)
        self.handoffs[via] += 1
        self.traces.begin(fence.lease, seq)
        self.loop.wake()
        return None

    def adopt(self, fence: LeaseId) -> SequenceState:
        """The lease's own sequence, for a prefill in this same worker. Raises StaleLease."""
        with self.engine.lock:
            seq = self.table.adopt(fence).seq
            seq.incoming.prefilled_here = True
            if seq.offload is not None:
                seq.offload.begin()
            return seq

    def _refuse(self, error: Retryable, fence: LeaseId | None) -> None:
        with self.engine.lock:  # chunks are refused on several threads
            self.refused[error.code or type(error).__name__] += 1
        lease = f"{fence.lease} epoch {fence.epoch}" if fence is not None else "that was not named"
        log.warning("KV refused for lease %s: %s", lease, error.message)

    # ---- tokens out --------------------------------------------------------------------------------------------

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """Send outputs of leases on, one message a router (serving.engine.loop.OutputListener). Errors end a lease.

        A lease that has ended or begun anew since the step began has another sequence, or none: it gets nothing.
        """
        events = LeaseEvents(kept=self.engine.tell_every > 1)
        leases = self.table.leases
        for output in outputs:
            seq, delta = output.seq, output.delta
            name = seq.order.lease.lease
            lease = leases.get(name)
            if lease is None or lease.seq is not seq:
                continue
            if output.prefilled:
                self.traces.begin(name, seq)
                continue
            events.add(lease, delta, output.error)
            if delta is None or delta.finish is not None:
                self.traces.end(name, seq, output)
                self.end(name)
        events.send(self.sessions)

    # ---- leaving -----------------------------------------------------------------------------------------------

    def _note_idle(self) -> None:
        if not self.table.leases:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Take no new leases; let the running ones finish for so long, then send the rest elsewhere."""
        self.draining = True
        self._idle.clear()
        self._note_idle()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            error = Draining(f"{self.identity.name} is leaving")
            left = [SequenceOutput(seq, error=error) for seq in self.sequences()]
            log.info("%d leases move to other workers", len(left))
            self.deliver(left)

    def abandon(self, error: MillraceError, computing: Collection[SequenceState] | None = None) -> None:
        """The engine died: every lease ends with this error; `computing` was in its step, None: not known."""
        self.draining = True
        events = LeaseEvents(kept=self.engine.tell_every > 1)
        for lease in list(self.table.leases.values()):
            self.table.end(lease.fence.lease)
            self.deadlines.forget(lease.fence.lease)
            self.direct.stop(lease.fence.lease)
            ended = of_crash(error, lease.seq, computing)
            self.traces.end(lease.fence.lease, lease.seq, SequenceOutput(lease.seq, error=ended))
            events.add(lease, None, ended)
        events.send(self.sessions)
        self._note_idle()

    # ---- accounts ----------------------------------------------------------------------------------------------

    def sequences(self) -> list[SequenceState]:
        return [lease.seq for lease in self.table.leases.values()]

    def counters(self) -> dict[str, float]:
        """What KV came and how, and leases refused: running totals by metric, a slash, and the metric's label."""
        with self.engine.lock:  # chunks are refused on several threads
            refused = dict(self.refused)
        totals = {
            "kv_chunks_refused": refused,
            "kv_received_bytes": self.received,
            "kv_handoffs": self.handoffs,
            "leases_refused": self.room.not_granted,
        }
        labelled = {f"{name}/{of}": float(value) for name, by in totals.items() for of, value in by.items()}
        return labelled | {
            "mixed_pairs": float(self.mixed_pairs),
            "leases_gave_way": float(self.room.gave_way),
            "decodes_paused": float(self.engine.totals.paused),
        }

    def orphans(self) -> int:
        """Leases whose session is gone; 0 unless something leaked."""
        return sum(lease.session not in self.sessions for lease in self.table.leases.values())


class RouterSession:
    """One router's leases on this worker (serving.links.DecodeSession)."""

    def __init__(self, worker: DecodeWorker, name: str, deliver: Deliver):
        self.worker = worker
        self.name = name
        self.deliver = deliver

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        return self.worker.open(order, self.name)

    async def advance(self, order: LeaseOrder) -> LeaseGrant:
        return self.worker.advance(order, self.name)

    def untold(self, but: int) -> list[LeaseEvent]:
        """The tokens of its leases that the engine has kept to tell later, `but` the last so many of each."""
        with self.worker.engine.lock:
            return untold(self.worker.table.of(self.name), but)

    def cancel(self, lease: str) -> None:
        if self.worker.table.held(lease, self.name) is not None:
            self.worker.end(lease)

    async def close(self) -> None:
        """End every lease of the session."""
        self.worker.sessions.pop(self.name, None)
        self.worker.room.turns.settled(self.name)
        for lease in self.worker.table.of(self.name):
            self.worker.end(lease.fence.lease)
