"""The prefill worker: queues a prompt, computes it in chunks, draws the first token, hands the KV over.

Where the lease is its own it computes into the lease's blocks, and nothing is handed over: on a mixed worker, and on a
decode worker for a text that has outgrown every prefill worker. It reaches decode workers through a dialer alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from math import inf
from typing import Protocol

from kvcache.handoff.sender import Handoff
from kvcache.memory.kv_dtype import choose_wire
from kvcache.worker_context import WorkerContext
from prefill.scheduler import PrefillScheduler
from serving.engine.ageing import ends_late
from serving.engine.objectives import DEADLINE_PASSED
from serving.engine.sequence import SequenceOutput, SequenceState, of_crash
from serving.errors import (
    LATE,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    MillraceError,
    Preempted,
    StaleLease,
    WorkerLost,
)
from serving.kvspec import AUTO, LayerKV
from serving.links import HandoffDialer, HandoffLink
from serving.messages import LeaseGrant, LeaseId, Prefilled, PrefillOrder, Role
from serving.tracing import PhaseSpan, carried

LOOK_SECONDS = 0.1  # between looks at a late prompt that has begun, or whose prefix is asked for
RESTED_LOOKS = 6  # in a row, in half a second, at a late prompt that has begun and rests, after which it ends


class LocalLeases(Protocol):
    """The decode side of the same worker."""

    def adopt(self, fence: LeaseId) -> SequenceState: ...


Layout = Callable[[str], tuple[str, tuple[LayerKV, ...]]]
"""The layout's fingerprint and the layers of a worker that keeps KV of this model as this dtype."""


class Prefixes(Protocol):
    """Where parts of a prompt's KV may come from that others have computed (kvcache.connector)."""

    async def bring(self, seq: SequenceState, begun: Callable[[], None]) -> None:
        """Returns when no more comes; `begun` is called as soon as the sequence may be queued."""


class PrefillWorker:
    """See the module (serving.links.PrefillLink). `leases` is set on a worker that decodes too.

    `layout` says how a decode worker stores KV, `kv_wire` how it travels there (kvcache.memory.kv_dtype.choose_wire).
    `arrived` is called when a prompt has joined the queue.
    """

    def __init__(
        self,
        context: WorkerContext,
        scheduler: PrefillScheduler,
        dialer: HandoffDialer,
        *,
        layout: Layout,
        kv_wire: str = "auto",
        leases: LocalLeases | None = None,
        prefixes: Prefixes | None = None,
    ):
        self.context = context
        self.identity = context.identity
        self.loop = context.loop
        self.engine = context.engine
        self.scheduler = scheduler
        self.dialer = dialer
        self.layout = layout
        self.kv_wire = kv_wire
        self.leases = leases
        self.prefixes = prefixes
        self.draining = False
        self.arrived: Callable[[], None] = lambda: None
        self.late = 0  # prompts that were late before they began, and may be shed
        self.expired = 0  # prefills ended because their deadline had passed
        self.bytes_sent = 0
        self._runs: dict[SequenceState, asyncio.Future[SequenceOutput]] = {}  # what a prefill brings out at its end
        self._idle = asyncio.Event()

    async def run(self, order: PrefillOrder) -> AsyncGenerator[Prefilled]:
        """Compute the order's tokens and draw the next one, then hand the KV over (serving.links.PrefillLink)."""
        if order.order.ends_in is not None and not order.order.ends_in > 0.0:
            self.expired += 1
            raise DeadlineExceeded(DEADLINE_PASSED)
        seq = self._sequence(order)
        self._runs[seq] = asyncio.get_running_loop().create_future()
        try:
            if order.grant is None or seq.stays:
                yield await self._first(seq)
                return
            link = self.dialer.dial(order.grant, self.identity.generation)
            try:
                with PhaseSpan("millrace.handoff", seq.request.trace, self._named()) as phase:
                    async with aclosing(self._handing_over(seq, order.grant, link)) as results:
                        async for prefilled in results:
                            yield prefilled
                    phase.attributes["millrace.tokens"] = len(order.order.request.prompt) - order.grant.cached_tokens
            finally:
                await link.close()
        finally:
            del self._runs[seq]
            if not seq.stays:
                self.loop.end(seq)
            if not self._runs:
                self._idle.set()

    def _sequence(self, order: PrefillOrder) -> SequenceState:
        """The lease's own sequence, or a new one that is ended with the prefill. Raises InvalidRequest, Retryable.

        The prompt of a worker's own lease was promised with it: even a leaving worker computes it. This also keeps
        mixed workers from waiting for each other's blocks.
        """
        grant = order.grant
        if grant is not None and grant.lease.instance == self.identity.instance and self.leases is not None:
            return self.leases.adopt(grant.lease)
        if self.identity.role is Role.DECODE:
            raise InvalidRequest(f"{self.identity.name} does not prefill for others")
        if self.draining:
            raise Draining(f"{self.identity.name} is draining")
        kv_dtype, layout = self._keeping(grant)
        return self.context.sequence(order.order, stays=False, kv_dtype=kv_dtype, fingerprint=layout)

    async def _handing_over(
        self, seq: SequenceState, grant: LeaseGrant, link: HandoffLink
    ) -> AsyncGenerator[Prefilled]:
        locations = self.context.locations
        device_kv = locations.device.kept_as(seq.kv_dtype)
        layout, layers = self.layout(grant.kv_dtype)
        wire = choose_wire(device_kv.specs, layers, self.kv_wire)
        handoff = Handoff(
            device_kv, link, seq, grant.lease, layout, grant.cached_tokens, wire=wire, locations=locations
        )
        seq.prefill.handoff = handoff
        sending = asyncio.create_task(handoff.send(), name=f"handoff-{grant.lease.lease}")
        first = asyncio.create_task(self._first(seq), name=f"prefill-{grant.lease.lease}")
        try:
            done, _ = await asyncio.wait([sending, first], return_when=asyncio.FIRST_COMPLETED)
            if sending in done:
                sending.result()  # a refused chunk ends the try before the prompt is computed
            prefilled, drawn_at = await first, self.engine.clock()
            yield prefilled
            if prefilled.delta.finish is None:
                async with self._in_time(seq):
                    await sending
                    await handoff.commit(prefilled.delta.tokens[-1], lambda: self.engine.clock() - drawn_at)
        except WorkerLost as error:
            ours = first.exception() if first.done() and not first.cancelled() else None
            if error is ours or error is handoff.unreadable:
                raise  # our own engine, or a rank of ours; anything else is the other end's loss
            raise StaleLease(f"the decode worker cannot be reached: {error.message}", code="decode_lost") from error
        finally:
            seq.prefill.handoff = None
            self.bytes_sent += handoff.bytes_sent
            for task in (sending, first):
                task.cancel()
            await asyncio.gather(sending, first, return_exceptions=True)

    async def _first(self, seq: SequenceState) -> Prefilled:
        """Queue the sequence and wait for its first token. Raises what the engine reports, DeadlineExceeded."""
        with PhaseSpan("millrace.prefill", seq.request.trace, self._named()) as phase:
            prefilled = await self._computed(seq)
            phase.attributes["millrace.queue_seconds"] = prefilled.queue_seconds
            phase.attributes["millrace.compute_seconds"] = prefilled.compute_seconds
            phase.attributes["millrace.cached_tokens"] = prefilled.cached_tokens
            phase.attributes["millrace.fetched_tokens"] = prefilled.fetched_tokens
        return prefilled

    def _named(self) -> dict[str, str]:
        return {"millrace.worker": self.identity.name}

    async def _computed(self, seq: SequenceState) -> Prefilled:
        first = self._runs[seq]
        # Nearly no request has a deadline, and few workers have elsewhere to bring KV from.
        in_time = self._in_time(seq) if seq.objectives.ends < inf else nullcontext()
        bringing = self._bringing(seq, self.prefixes) if self.prefixes is not None else nullcontext()
        not_late = self._not_late(seq) if ends_late(seq.order) else nullcontext()
        async with in_time, not_late, bringing:
            with self.engine.lock:
                if seq.ended:
                    raise StaleLease("the lease ended before its prefill began", code="lease")
                if not first.done():  # the engine may have died meanwhile
                    self.scheduler.add(seq)
            self.loop.wake(hurry=seq.incoming.arrival is None)
            self.arrived()
            output = await first
        if output.error is not None:
            raise output.error
        assert output.delta is not None
        now = self.engine.clock()
        began = seq.prefill.scheduled_at if seq.prefill.scheduled_at is not None else now
        return Prefilled(
            delta=output.delta,
            cached_tokens=seq.cached,
            fetched_tokens=seq.incoming.fetched,
            queue_seconds=began - seq.prefill.waiting_since,
            compute_seconds=now - began,
        )

    @asynccontextmanager
    async def _in_time(self, seq: SequenceState) -> AsyncIterator[None]:
        """Work that ends with DeadlineExceeded once the sequence's deadline passes. Nothing may be yielded within."""
        left = seq.objectives.ends - self.engine.clock()
        try:
            async with asyncio.timeout(max(0.0, left) if left < inf else None) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            self.expired += 1
            raise DeadlineExceeded(DEADLINE_PASSED) from None

    @asynccontextmanager
    async def _not_late(self, seq: SequenceState) -> AsyncIterator[None]:
        """Work that ends with Preempted when the first token is due, if nothing of the prompt is computed or fetched.

        What has begun ends once it is late and, at RESTED_LOOKS in a row, no step has had any of it. No step takes it
        from then on. Nothing may be yielded within.
        """
        loop, incoming = asyncio.get_running_loop(), seq.incoming
        timer: asyncio.TimerHandle
        rested = 0  # looks, and not seconds: a process that was stopped leaves nothing aside
        seen = seq.computed  # as it was at the last look
        late = Preempted("it was late, and none of it was being computed", code=LATE)

        def look() -> None:
            nonlocal timer, rested, seen
            with self.engine.lock:
                if seq.ended or self._runs[seq].done() or len(seq.tokens) > seq.start:
                    return  # what came of it is on its way
                if seq.prefill.scheduled_at is None and incoming.arrival is None and not incoming.fetched:
                    rested = RESTED_LOOKS  # what is cached of it was not computed for it
                elif seq.in_flight or seq.computed != seen or incoming.arrival is not None:  # what comes may be nothing
                    rested, seen = 0, seq.computed
                else:
                    rested += 1
                if rested < RESTED_LOOKS:
                    timer = loop.call_later(LOOK_SECONDS, look)
                    return
                self.late += 1
                self.scheduler.remove(seq)
                self._end(SequenceOutput(seq, error=late))  # nor is it queued, if it came to that in this turn

        timer = loop.call_later(max(0.0, seq.objectives.due - self.engine.clock()), look)
        try:
            yield
        finally:
            timer.cancel()

    @asynccontextmanager
    async def _bringing(self, seq: SequenceState, prefixes: Prefixes) -> AsyncIterator[None]:
        """Entered once the sequence may be queued, though some of its prefix may still come; no more does after."""
        begun = asyncio.Event()
        bringing = asyncio.create_task(self._bring(prefixes, seq, begun.set), name="bring-prefix")
        bringing.add_done_callback(lambda _: begun.set())
        self._runs[seq].add_done_callback(lambda _: begun.set())  # it has ended before it began
        bringing.add_done_callback(lambda _: self.loop.wake())  # an arriving prefix no longer holds it up
        try:
            await begun.wait()
            yield
        finally:
            bringing.cancel()
            await asyncio.wait([bringing])
            if not bringing.cancelled():
                bringing.result()

    async def _bring(self, prefixes: Prefixes, seq: SequenceState, begun: Callable[[], None]) -> None:
        with PhaseSpan("millrace.fetch", seq.request.trace, self._named()) as phase, carried(phase.context):
            await prefixes.bring(seq, begun)
            phase.attributes["millrace.fetched_tokens"] = seq.incoming.fetched

    def _keeping(self, grant: LeaseGrant | None) -> tuple[str, str | None]:
        """The dtype of KV a prompt is computed over, and its layout's fingerprint: its decode worker's where possible.

        Else the worker's own, None.
        Were KV rounded only when it leaves, the prompt would attend to other values than its decode worker's own do.
        """
        device_kv = self.context.device_kv
        if grant is not None and grant.kv_dtype != self.identity.kv_dtype and device_kv.can_keep(grant.kv_dtype):
            return grant.kv_dtype, self.layout(grant.kv_dtype)[0]
        return AUTO, None

    def deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """Take the first tokens, and the errors, of prefills (serving.engine.loop.OutputListener)."""
        for output in outputs:
            if output.prefilled or not output.seq.stays:
                self._end(output)

    def _end(self, output: SequenceOutput) -> None:
        first = self._runs.get(output.seq)
        if first is not None and not first.done():
            first.set_result(output)

    async def drain(self, seconds: float) -> None:
        """Take no new prompts but for our own leases; finish the queue and hand over all KV, until the time is up."""
        self.draining = True
        if not self._runs:
            return
        self._idle.clear()
        with suppress(TimeoutError):  # then the process leaves; routers see the broken calls and go elsewhere
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    def abandon(self, error: MillraceError, computing: Collection[SequenceState] | None = None) -> None:
        """The engine died: every prefill that waits for it ends with this error; `computing` was in its step."""
        self.draining = True
        for seq in self._runs:
            self._end(SequenceOutput(seq, error=of_crash(error, seq, computing)))

    def sequences(self) -> list[SequenceState]:
        return list(self._runs)
