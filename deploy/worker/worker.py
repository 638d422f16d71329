"""One running worker: what it answers to routers, and how it starts, drains and stops.

A mixed worker is a decode worker and a prefill worker over one engine and one KV cache. A decode worker is that too,
but computes prompts only of its own texts that have outgrown every prefill worker. deploy.worker.build makes it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from decode.speculation import Speculation
from decode.worker import DecodeWorker, RouterSession
from deploy.worker.step_costs import StepCostKeeper
from kvcache.blocks.events import KVEventLog
from kvcache.connector.connector import PoolConnector
from kvcache.memory.early_pages import EarlyPages
from kvcache.worker_context import WorkerContext
from prefill.worker import PrefillWorker
from serving.background import BackgroundTasks
from serving.engine.sequence import SequenceState
from serving.errors import InvalidRequest, MillraceError, WorkerLost
from serving.links import Deliver
from serving.messages import STEP_TOKEN_BINS, TPOT_BINS_MS, Audit, KVEvents, Prefilled, PrefillOrder, WorkerStatus
from serving.step_cost import StepCost, StepLoad

FLUSH_SECONDS = 5.0  # a leaving worker gives what it computed so long to reach the KV pool


class Worker:
    """See the module. In process it is its own link (router.fleet.WorkerLink).

    `address` is where others reach its gRPC, or its name in process. Start it on a running event loop.
    """

    def __init__(
        self,
        context: WorkerContext,
        prefill: PrefillWorker,
        decode: DecodeWorker | None,
        *,
        address: str,
        events: KVEventLog,
        costs: StepCostKeeper,
        connector: PoolConnector | None = None,
    ):
        self.context = context
        self.identity = context.identity
        self.loop = context.loop
        self.engine = context.engine
        self.kv = context.kv
        self.prefill = prefill
        self.decode = decode
        self.address = address
        self.events = events
        self.costs = costs
        self.connector = connector
        self.rank_counters: Callable[[], Mapping[str, float]] = dict  # running totals of its ranks, by metric
        self.early_pages: EarlyPages | None = None  # of its KV
        self.restarts: Counter[str] = Counter()  # of background tasks that broke, by name
        self._background = BackgroundTasks(self.restarts)
        self.flips = 0  # of its process, until now
        self.crashed = asyncio.Event()  # the engine has died: the process must leave

    # ---- links -------------------------------------------------------------------------------------------------

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> RouterSession:
        if self.decode is None:
            raise InvalidRequest(f"{self.identity.name} does not decode")
        return await self.decode.connect(router, deliver, lost)

    def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        return self.prefill.run(order)

    async def audit(self) -> list[Audit]:
        return [self.audit_now()]

    async def close(self) -> None:
        """A link is closed by its router; the worker itself goes on."""

    # ---- start to stop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.loop.start(self._sides(), self._crashed)
        if self.connector is not None:
            self.connector.start(self.restarts)
        self.costs.start(self.restarts)
        if self.early_pages is not None:
            self._background.start("kv-pages", self.early_pages.run)

    async def drain(self, seconds: float) -> None:
        """Take no new work, finish or hand back what there is, and see all KV handed over."""
        self.prefill.draining = True
        await asyncio.gather(*(side.drain(seconds) for side in self._sides()))  # the platform counts them once
        if self.connector is not None:
            await self.connector.flush(min(seconds, FLUSH_SECONDS))

    @property
    def drained(self) -> bool:
        """True if it holds no request."""
        return not any(side.sequences() for side in self._sides())

    @property
    def idle(self) -> bool:
        """True if nobody waits for it, and somebody may come."""
        return self.drained and not self.draining

    def resume(self) -> None:
        """It goes on after a drain."""
        for side in self._sides():
            side.draining = False

    async def stop(self) -> None:
        await self._background.stop()
        if self.connector is not None:
            await self.connector.stop()
        await self.loop.stop()
        await self.costs.stop()
        if self.engine.trace is not None:
            self.engine.trace.close()

    def _crashed(self) -> None:
        """The engine is gone: everything that waits for it ends with an error."""
        for side in self._sides():
            side.abandon(WorkerLost(f"the engine of {self.identity.name} died"), set(self.engine.flying) or None)
        self.crashed.set()

    def _sides(self) -> list[PrefillWorker | DecodeWorker]:
        return [self.prefill, self.decode] if self.decode is not None else [self.prefill]

    # ---- accounts ----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return any(side.draining for side in self._sides())

    def status(self) -> WorkerStatus:
        """The heartbeat. It gives the fit of the steps' cost its turn, too."""
        identity, limits, blocks = self.identity, self.engine.limits, self.kv.allocator
        self.costs.meter.fit.refit(self.engine.clock())
        outlook = self.costs.meter.outlook()
        running = list(self.decode.scheduler.running) if self.decode is not None else []
        context = sum(len(seq.tokens) for seq in running)
        return WorkerStatus(
            instance=identity.instance,
            name=identity.name,
            role=identity.role,
            address=self.address,
            fingerprint=identity.fingerprint,
            pairing=identity.pairing,
            model=identity.model,
            max_model_len=identity.max_model_len,
            block_size=blocks.block_size,
            total_blocks=blocks.num_blocks,
            free_blocks=blocks.available,
            max_seqs=limits.max_num_seqs,
            running=len(running),
            waiting=len(self.prefill.scheduler.queue),
            waiting_tokens=self.prefill.scheduler.waiting_tokens,
            waiting_seconds=self._waiting_seconds(outlook, len(running), context),
            leases=len(self.decode.table.leases) if self.decode is not None else 0,
            context_tokens=context,
            tpot_counts=tpot_counts(running) if self.decode is not None else (),
            prompt_share=self.costs.meter.prompt_share(self.engine.clock()),
            step_cost=outlook,
            max_batched_tokens=limits.max_num_batched_tokens,
            draining=self.draining,
            stalled_seconds=self.engine.stalled_seconds,
            long_rope_after=identity.long_rope_after,
            counters=self._counters(),
            ranks=identity.ranks,
            kv_protocol=identity.kv_protocol,
        )

    def _waiting_seconds(self, outlook: StepCost, decodes: int, context: int) -> float:
        """What the queued prompts are predicted to take beside so many decodes, which read so much context.

        Each step computes as many tokens of prompts as its budget leaves: the decodes take one token each.
        """
        queued = [(seq.computed, len(seq.tokens)) for seq in list(self.prefill.scheduler.queue)]
        beside = StepLoad(decodes, context, decodes, context)
        return outlook.queue_seconds(queued, self.engine.limits.max_num_batched_tokens - decodes, beside)

    def _counters(self) -> dict[str, float]:
        """Running totals by metric (serving.metrics)."""
        totals, host = self.engine.totals, self.context.locations.host
        decoding = self.decode.scheduler if self.decode is not None else None
        counters = {
            "prefix_cache_queries": float(self.kv.queries),
            "prefix_cache_hits": float(self.kv.hits),
            "num_preemptions": float(decoding.preemptions if decoding is not None else 0),
            "engine_steps": float(totals.steps),
            "engine_tokens": float(totals.tokens),
            "engine_step_seconds": totals.step_seconds,
            "engine_forward_seconds": totals.forward_seconds,
            "engine_sample_seconds": totals.sample_seconds,
            "engine_proposing_seconds": totals.proposing_seconds,
            "engine_python_seconds": totals.python_seconds,
            "engine_kv_wait_seconds": totals.waited_seconds,
            "kv_transfer_bytes": float(self.prefill.bytes_sent),
            "role_flips": float(self.flips),
            "late_prompts": float(self.prefill.late),
            "deadlines_exceeded": float(self.prefill.expired + (self.decode.expired if self.decode is not None else 0)),
        }
        if decoding is not None and decoding.speculation is not None:
            counters |= drafting(decoding.speculation)
        if self.connector is not None:
            counters.update(self.connector.counters())
        if host is not None:
            counters["host_kv_bytes_out"] = float(host.bytes_out)
            counters["host_kv_bytes_in"] = float(host.bytes_in)
        if self.decode is not None:
            counters.update(self.decode.counters())
        counters.update(self.rank_counters())
        bins = zip((*STEP_TOKEN_BINS, "+Inf"), totals.sizes, strict=True)
        return counters | {f"iteration_tokens/{most}": float(count) for most, count in bins if count}

    def kv_events(self, since: int) -> KVEvents:
        """The block keys stored and removed since event number `since` (kvcache.blocks.events)."""
        with self.engine.lock:
            return self.events.since(since)

    def audit_now(self) -> Audit:
        """What the worker holds now, and what of it leaked: is held, but owned by nothing."""
        with self.engine.lock:
            owned = {id(seq): seq for side in self._sides() for seq in side.sequences()}
            owned |= {id(seq): seq for seq in self.engine.flying}
            queued = [seq for scheduler in self.engine.schedulers for seq in scheduler.sequences()]
            decode, connector, host = self.decode, self.connector, self.kv.host
            counts = {
                "leases": len(decode.table.leases) if decode is not None else 0,
                "blocks": self.kv.allocator.held,
                "sequences": len(queued),
                "streams": decode.receiving if decode is not None else 0,
                "fetches": decode.direct.running if decode is not None else 0,
                "tasks": len(self.prefill.sequences()),
            }
            leaked = {
                "leases": decode.orphans() if decode is not None else 0,
                "blocks": self.kv.unaccounted(owned.values(), connector.table() if connector is not None else ()),
                "tasks": sum(id(seq) not in owned for seq in queued),
            }
            if self.engine.proposer is not None:
                running = (seq for seq in owned.values() if not seq.ended)  # others have given their blocks back
                drafting = [(len(seq.proposed.blocks), len(seq.blocks)) for seq in running if seq.proposed]
                counts["draft_blocks"] = sum(with_drafts for with_drafts, _ in drafting)
                leaked["draft_blocks"] = sum(max(0, with_drafts - held) for with_drafts, held in drafting)
            if host is not None:
                counts["host_extents"] = host.extents.held
                extents = connector.extents() if connector is not None else ()
                leaked["host_extents"] = self.kv.unaccounted_on_host(owned.values(), extents)
        return Audit(service=self.identity.name, counts=counts, leaked=leaked)


def tpot_counts(running: Sequence[SequenceState]) -> tuple[int, ...]:
    """How many of the sequences have a TPOT objective in each bin of TPOT_BINS_MS; those without are in the last."""
    counts = [0] * (len(TPOT_BINS_MS) + 1)
    for seq in running:
        objective = seq.request.slo.tpot_ms
        counts[len(TPOT_BINS_MS) if objective is None else bisect_left(TPOT_BINS_MS, objective)] += 1
    return tuple(counts)


def drafting(speculation: Speculation) -> dict[str, float]:
    """Running totals of drafts, by metric."""
    totals = {
        "spec_decode_num_drafts": float(speculation.drafts),
        "spec_decode_num_draft_tokens": float(speculation.drafted),
        "spec_decode_num_accepted_tokens": float(speculation.accepted),
    }
    counters = totals | {f"{name}_by_method/{speculation.method}": total for name, total in totals.items()}
    at = enumerate(speculation.accepted_at)
    return counters | {f"spec_decode_num_accepted_tokens_per_pos/{position}": float(count) for position, count in at}
