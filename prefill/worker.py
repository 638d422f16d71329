"""The prefill worker: queues a prompt, computes it in chunks, draws the first token, sees the KV handed over.

When the lease is its own, it computes into the lease's blocks and the handoff is nothing at all: on a mixed worker, and
on one that decodes a text which nobody else can hold any more.
It reaches decode workers only through a dialer that is handed to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.prefix import root_key
from kvcache.handoff.sender import Handoff
from kvcache.memory.device import DeviceKV
from kvcache.memory.kv_dtype import choose_wire
from kvcache.memory.locations import KVLocations
from prefill.scheduler import PrefillScheduler
from serving.engine.loop import EngineLoop
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.errors import ContextLengthExceeded, Draining, InvalidRequest, MillraceError, StaleLease, WorkerLost
from serving.kvspec import AUTO, LayerKV
from serving.links import HandoffDialer, HandoffLink
from serving.messages import LeaseGrant, LeaseId, Prefilled, PrefillOrder, Role, WorkerIdentity


class LocalLeases(Protocol):
    """The decode side of the same worker."""

    def adopt(self, fence: LeaseId) -> SequenceState: ...


Layout = Callable[[str], tuple[str, tuple[LayerKV, ...]]]
"""The layout's fingerprint and the layers of a worker that keeps KV of this model as this dtype."""


class Prefixes(Protocol):
    """Where parts of a prompt's KV may come from that others have computed (kvcache.connector)."""

    async def bring(self, seq: SequenceState, begun: Callable[[], None]) -> None:
        """Returns when no more comes; `begun` is called as soon as the sequence may be queued."""


class FirstToken:
    """Waits for what the engine brings out at the end of a prefill."""

    def __init__(self) -> None:
        self.future: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()

    def deliver(self, output: SequenceOutput) -> None:
        if not self.future.done():
            self.future.set_result(output)


class PrefillWorker:
    """See the module (serving.links.PrefillLink). `leases` is set on a worker that decodes too.

    `locations` are the memories KV is handed over from, by default `device_kv` alone.
    `layout` says how a decode worker stores KV, `kv_wire` how it travels there (kvcache.memory.kv_dtype.choose_wire).
    """

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        loop: EngineLoop,
        kv: KVCacheManager,
        device_kv: DeviceKV,
        locations: KVLocations | None = None,
        scheduler: PrefillScheduler,
        long_rope: Callable[[int], bool],
        dialer: HandoffDialer,
        layout: Layout,
        kv_wire: str = "auto",
        leases: LocalLeases | None = None,
        prefixes: Prefixes | None = None,
    ):
        self.identity = identity
        self.loop = loop
        self.engine = loop.engine
        self.kv = kv
        self.device_kv = device_kv
        self.locations = locations or KVLocations(device_kv)
        self.scheduler = scheduler
        self.long_rope = long_rope
        self.dialer = dialer
        self.layout = layout
        self.kv_wire = kv_wire
        self.leases = leases
        self.prefixes = prefixes
        self.draining = False
        self.bytes_sent = 0
        self._runs: dict[int, SequenceState] = {}  # prefills in progress, by id of the sequence
        self._idle = asyncio.Event()

    async def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        """Compute the order's tokens and draw the next one, then hand the KV over (serving.links.PrefillLink)."""
        if not self._own(order):
            if self.identity.role is Role.DECODE:
                raise InvalidRequest(f"{self.identity.name} does not prefill for others")
            if self.draining:
                raise Draining(f"{self.identity.name} is draining")
        async with self._sequence(order) as seq:
            if order.grant is None or seq.stays:
                yield await self._first(seq)
                return
            link = self.dialer.dial(order.grant)
            try:
                async for prefilled in self._handing_over(seq, order, link):
                    yield prefilled
            finally:
                await link.close()

    async def _handing_over(
        self, seq: SequenceState, order: PrefillOrder, link: HandoffLink
    ) -> AsyncIterator[Prefilled]:
        grant = order.grant
        assert grant is not None
        device_kv = self.device_kv.kept_as(seq.kv_dtype)
        layout, layers = self.layout(grant.kv_dtype)
        wire = choose_wire(device_kv.specs, layers, self.kv_wire)
        handoff = Handoff(
            device_kv, link, seq, grant.lease, layout, grant.cached_tokens, wire=wire, locations=self.locations
        )
        seq.handoff = handoff
        sending = asyncio.create_task(handoff.send(), name=f"handoff-{grant.lease.lease}")
        first = asyncio.create_task(self._first(seq), name=f"prefill-{grant.lease.lease}")
        try:
            done, _ = await asyncio.wait([sending, first], return_when=asyncio.FIRST_COMPLETED)
            if sending in done:
                sending.result()  # a refused chunk ends the try before the prompt is computed
            prefilled = await first
            yield prefilled
            if prefilled.delta.finish is None:
                await sending
                await handoff.commit(prefilled.delta.tokens[-1])
        except WorkerLost as error:
            if first.done() and not first.cancelled() and first.exception() is error:
                raise  # our own engine; anything else is the other end's loss
            raise StaleLease(f"the decode worker cannot be reached: {error.message}", code="decode_lost") from error
        finally:
            seq.handoff = None
            self.bytes_sent += handoff.bytes_sent
            for task in (sending, first):
                task.cancel()
            await asyncio.gather(sending, first, return_exceptions=True)

    def _own(self, order: PrefillOrder) -> bool:
        """Whether the lease is this worker's: its prompt was promised with it, so even a leaving worker computes it.

        That nobody else has to also keeps mixed workers from waiting for blocks at each other.
        """
        grant = order.grant
        return grant is not None and grant.lease.instance == self.identity.instance and self.leases is not None

    async def _first(self, seq: SequenceState) -> Prefilled:
        """Queue the sequence and wait for its first token. Raises what the engine reports."""
        sink = FirstToken()
        seq.prefill_sink = sink
        async with self._bringing(seq):
            with self.engine.lock:
                if seq.ended:
                    raise WorkerLost("the lease ended before its prefill began")
                if not sink.future.done():  # the engine may have died meanwhile
                    self.scheduler.add(seq)
            self.loop.wake(hurry=seq.arrival is None)
            output = await sink.future
        if output.error is not None:
            raise output.error
        assert output.delta is not None
        now = self.engine.clock()
        began = seq.scheduled_at if seq.scheduled_at is not None else now
        return Prefilled(
            delta=output.delta,
            cached_tokens=seq.cached,
            queue_seconds=began - seq.waiting_since,
            compute_seconds=now - began,
        )

    @asynccontextmanager
    async def _bringing(self, seq: SequenceState) -> AsyncIterator[None]:
        """Entered once the sequence may be queued, though some of its prefix may still come; no more does after."""
        if self.prefixes is None:
            yield
            return
        begun = asyncio.Event()
        bringing = asyncio.create_task(self.prefixes.bring(seq, begun.set), name="bring-prefix")
        bringing.add_done_callback(lambda _: begun.set())
        bringing.add_done_callback(lambda _: self.loop.wake())  # from now on it waits for nobody
        try:
            await begun.wait()
            yield
        finally:
            bringing.cancel()
            await asyncio.wait([bringing])
            if not bringing.cancelled():
                bringing.result()

    @asynccontextmanager
    async def _sequence(self, order: PrefillOrder) -> AsyncIterator[SequenceState]:
        """The lease's own sequence, or a new one of ours that is gone when the prefill is over."""
        if self._own(order):
            assert order.grant is not None and self.leases is not None
            seq = self.leases.adopt(order.grant.lease)
        else:
            seq = self._new_sequence(order)
        self._runs[id(seq)] = seq
        try:
            yield seq
        finally:
            del self._runs[id(seq)]
            if not seq.stays:
                self.loop.end(seq)
            if not self._runs:
                self._idle.set()

    def _new_sequence(self, order: PrefillOrder) -> SequenceState:
        request = order.order.request
        tokens = len(request.prompt) + len(order.order.generated)
        limit = self.identity.max_model_len
        if tokens >= limit:
            raise ContextLengthExceeded(
                f"{tokens} tokens leave no room to generate within the context of {limit}", param="prompt"
            )
        long_rope = self.long_rope(len(request.prompt) + request.sampling.max_tokens)
        kv_dtype, layout = self._keeping(order.grant)
        root = root_key(layout, request.tenant, long_rope)
        now = self.engine.clock()
        return SequenceState(order.order, root=root, stays=False, long_rope=long_rope, now=now, kv_dtype=kv_dtype)

    def _keeping(self, grant: LeaseGrant | None) -> tuple[str, str]:
        """What KV a prompt is computed over, and its layout's fingerprint: its decode worker's, if blocks can hold it.

        A prompt that attends to KV which is rounded only when it leaves is not what its decode worker would compute.
        """
        if grant is not None and grant.kv_dtype != self.identity.kv_dtype and self.device_kv.can_keep(grant.kv_dtype):
            return grant.kv_dtype, self.layout(grant.kv_dtype)[0]
        return AUTO, self.kv.fingerprint

    async def drain(self, seconds: float) -> None:
        """Take no new prompts but for our own leases; finish the queue and hand over all KV, until the time is up."""
        self.draining = True
        if not self._runs:
            return
        self._idle.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return  # the process leaves; routers see the broken calls and go elsewhere

    def abandon(self, error: MillraceError) -> None:
        """The engine died: every prefill that waits for it ends with this error."""
        self.draining = True
        for seq in self._runs.values():
            if seq.prefill_sink is not None:
                seq.prefill_sink.deliver(SequenceOutput(seq, error=error))

    def sequences(self) -> list[SequenceState]:
        return list(self._runs.values())
