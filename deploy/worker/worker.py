"""One worker: a model on a device, its KV pool, and the schedulers and doors of its role, put together.

A mixed worker is a decode worker and a prefill worker over one engine and one pool; that is all there is to it. A
decode worker is that too, but computes no prompts: only texts of its own that no prefill worker can hold any more.
"""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from pathlib import Path

from decode.scheduler import DecodeScheduler
from decode.speculation import Speculation
from decode.worker import DecodeWorker, RouterSession
from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.events import KVEventLog
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadManager, OffloadPlan, plan_host
from kvcache.connector.connector import PoolConnector
from kvcache.handoff.dialer import Dialer
from kvcache.memory.device import DeviceKV, blocks_in
from kvcache.memory.host import HostKV
from kvcache.memory.locations import KVLocations
from kvcache.pool.links import PoolLink
from prefill.scheduler import PrefillScheduler
from prefill.worker import PrefillWorker
from serving.config import EngineConfig, ModelConfig, PoolConfig
from serving.engine.loop import EngineLoop
from serving.engine.overlap import engine_for
from serving.engine.plan import Scheduler
from serving.engine.record import StepRecord
from serving.engine.runner import ModelRunner
from serving.engine.sequence import SequenceState
from serving.engine.tracing import TraceWriter
from serving.errors import InvalidRequest, MillraceError, WorkerLost
from serving.forward.choose import make_forward, make_sampler
from serving.forward.forward import Forward
from serving.kvspec import LayerKV
from serving.links import Deliver
from serving.loader.loading import LoadedModel
from serving.messages import Audit, KVEvents, Prefilled, PrefillOrder, Role, WorkerIdentity, WorkerStatus

FLUSH_SECONDS = 5.0  # a leaving worker gives what it computed so long to reach the KV pool


class Worker:
    """See the module. In process it is its own link (router.fleet.WorkerLink).

    `address` is where others reach its gRPC, or its name in process. Create and start it on a running event loop.
    """

    def __init__(
        self,
        role: Role,
        model: LoadedModel,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        *,
        name: str | None = None,
        address: str,
        dialer: Dialer,
        on_crash: Callable[[], None] | None = None,
        pool_config: PoolConfig | None = None,
        pool_link: Callable[[str], PoolLink] | None = None,
    ):
        if engine_config.deterministic and engine_config.kv_wire != "auto":
            raise ValueError("--kv-wire int8 changes bits, which --deterministic promises not to happen")
        kv_dtype = model.dtype if model_config.kv_cache_dtype == "auto" else "int8"
        specs = model.spec.kv_layers(kv_dtype)
        blocks = engine_config.num_kv_blocks or blocks_in(
            engine_config.kv_cache_memory, specs, engine_config.block_size
        )
        host = host_plan(specs, engine_config, blocks)
        if host is not None:
            blocks = host.device_blocks
        limit = context_limit(model, model_config, host.tokens if host else blocks * engine_config.block_size)
        self.model = model
        self.address = address
        self.on_crash = on_crash
        self.device_kv = DeviceKV(specs, blocks, engine_config.block_size, model_config.device)
        forward = make_forward(model, self.device_kv.planes, engine_config, limit)
        form = self.form = forward.form if engine_config.deterministic else "any"
        self.identity = WorkerIdentity(
            instance=uuid.uuid4().hex,
            name=name or f"{role}-{socket.gethostname()}-{os.getpid()}",
            role=role,
            model=str(model.path),
            fingerprint=layout_fingerprint(model.fingerprint, specs, form),
            pairing=layout_fingerprint(model.fingerprint, specs if engine_config.deterministic else (), form),
            kv_dtype=kv_dtype,
            max_model_len=limit,
        )
        self._kv_events = KVEventLog()
        self.blocks = BlockAllocator(
            blocks, engine_config.block_size, caching=engine_config.enable_prefix_caching, events=self._kv_events
        )
        self.kv = KVCacheManager(self.blocks, self.identity.fingerprint, OffloadManager(host) if host else None)
        windows = [model.spec.window(layer) for layer in range(model.spec.layers)]
        self.host_kv = HostKV(host, self.device_kv, windows) if host else None
        guesses = engine_config.num_speculative_tokens
        speculation = Speculation(guesses) if guesses > 0 else None
        self._decoding = DecodeScheduler(self.kv, max_model_len=limit, speculation=speculation)
        self._prefilling = PrefillScheduler(self.kv, self._decoding.add, self._measured)
        eos = frozenset(model.spec.eos_token_ids)
        self.engine = engine_for(model_config.device)(
            ModelRunner(
                forward,
                model.spec,
                engine_config.block_size,
                model_config.device,
                self.host_kv,
                make_sampler(forward),
                self._other_forwards(role, forward),
            ),
            self.kv,
            self._schedulers(role),
            max_num_batched_tokens=engine_config.max_num_batched_tokens,
            max_num_seqs=engine_config.max_num_seqs,
            max_model_len=limit,
            eos_token_ids=eos,
        )
        if engine_config.profile is not None:
            self.engine.trace = TraceWriter(trace_path(engine_config.profile, self.identity.name), self.identity.name)
        self.loop = EngineLoop(self.engine, on_crash=self._crashed)
        self.connector: PoolConnector | None = None
        if pool_link is not None and engine_config.enable_prefix_caching:
            self.connector = PoolConnector(
                pool_link,
                pool_config or PoolConfig(),
                self.kv,
                self.device_kv,
                self.engine.lock,
                busy=lambda: bool(self._prefilling.queue),
                host=self.host_kv,
            )
        self._make_doors(role, dialer, engine_config.kv_wire)

    def _other_forwards(self, role: Role, forward: Forward) -> dict[str, Forward]:
        """What computes prompts for decode workers that keep KV in another dtype (prefill.worker)."""
        if role is Role.DECODE or not self.device_kv.can_keep("int8"):
            return {}
        return {"int8": forward.over(self.device_kv.kept_as("int8").planes)}

    def _measured(self, record: StepRecord) -> None:
        """What a step took is what fetching a prefix is weighed against."""
        if self.connector is not None:
            self.connector.pace.stepped(record)

    def _schedulers(self, role: Role) -> list[Scheduler]:
        """The role is just this list: decode goes first, prompts get the rest of the step."""
        schedulers: dict[Role, list[Scheduler]] = {
            Role.PREFILL: [self._prefilling],
            Role.DECODE: [self._decoding, self._prefilling],  # of its own texts, where nobody else can
            Role.MIXED: [self._decoding, self._prefilling],
        }
        return schedulers[role]

    def _make_doors(self, role: Role, dialer: Dialer, kv_wire: str) -> None:
        long_rope = self.model.spec.rope_is_long
        locations = KVLocations(self.device_kv, self.host_kv, self.engine.lock)
        self.decode: DecodeWorker | None = None
        if role is not Role.PREFILL:
            self.decode = DecodeWorker(
                identity=self.identity,
                loop=self.loop,
                kv=self.kv,
                device_kv=self.device_kv,
                locations=locations,
                scheduler=self._decoding,
                long_rope=long_rope,
                address=self.address,
                direct=self.connector.direct if self.connector is not None else None,
                wanted=self._prefilling.wanted_blocks,
            )
        self.prefill = PrefillWorker(
            identity=self.identity,
            loop=self.loop,
            kv=self.kv,
            device_kv=self.device_kv,
            locations=locations,
            scheduler=self._prefilling,
            long_rope=long_rope,
            dialer=dialer,
            layout=self._layout,
            kv_wire=kv_wire,
            leases=self.decode,
            prefixes=self.connector,
        )

    def _layout(self, kv_dtype: str) -> tuple[str, tuple[LayerKV, ...]]:
        """What a worker of this model is like that keeps KV as `kv_dtype` (prefill.worker.Layout)."""
        specs = self.model.spec.kv_layers(kv_dtype)
        return layout_fingerprint(self.model.fingerprint, specs, self.form), specs

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

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.loop.start()
        if self.connector is not None:
            self.connector.start()

    async def drain(self, seconds: float) -> None:
        """Take no new work, finish or hand back what there is, and see all KV handed over."""
        self.prefill.draining = True
        if self.decode is not None:
            await self.decode.drain(seconds)
        await self.prefill.drain(seconds)
        if self.connector is not None:
            await self.connector.flush(min(seconds, FLUSH_SECONDS))

    async def stop(self) -> None:
        if self.connector is not None:
            await self.connector.stop()
        await self.loop.stop()
        if self.engine.trace is not None:
            self.engine.trace.close()

    def _crashed(self) -> None:
        """The engine is gone: everyone who waits for it must hear so."""
        error = WorkerLost(f"the engine of {self.identity.name} died")
        self.prefill.abandon(error)
        if self.decode is not None:
            self.decode.abandon(error)
        if self.on_crash is not None:
            self.on_crash()

    # ---- accounts ----------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return any(door is not None and door.draining for door in (self.decode, self.prefill))

    def status(self) -> WorkerStatus:
        """The heartbeat."""
        identity, totals = self.identity, self.engine.totals
        counters = {
            "prefix_cache_queries": float(self.kv.queries),
            "prefix_cache_hits": float(self.kv.hits),
            "num_preemptions": float(self._decoding.preemptions),
            "engine_steps": float(totals.steps),
            "engine_tokens": float(totals.tokens),
            "engine_step_seconds": totals.step_seconds,
            "engine_forward_seconds": totals.forward_seconds,
            "engine_sample_seconds": totals.sample_seconds,
            "engine_python_seconds": totals.python_seconds,
            "engine_kv_wait_seconds": totals.waited_seconds,
            "kv_transfer_bytes": float(self.prefill.bytes_sent),
        }
        if self._decoding.speculation is not None:
            counters["spec_decode_num_draft_tokens"] = float(self._decoding.speculation.drafted)
            counters["spec_decode_num_accepted_tokens"] = float(self._decoding.speculation.accepted)
        if self.connector is not None:
            counters.update(self.connector.counters())
        if self.host_kv is not None:
            counters["host_kv_bytes_out"] = float(self.host_kv.bytes_out)
            counters["host_kv_bytes_in"] = float(self.host_kv.bytes_in)
        if self.decode is not None:
            counters.update(self.decode.counters())
        return WorkerStatus(
            instance=identity.instance,
            name=identity.name,
            role=identity.role,
            address=self.address,
            fingerprint=identity.fingerprint,
            pairing=identity.pairing,
            model=identity.model,
            max_model_len=identity.max_model_len,
            block_size=self.blocks.block_size,
            total_blocks=self.blocks.num_blocks,
            free_blocks=self.blocks.available,
            max_seqs=self.engine.max_num_seqs,
            running=len(self._decoding.running),
            waiting=len(self._prefilling.queue),
            waiting_tokens=self._prefilling.waiting_tokens,
            draining=self.draining,
            stalled_seconds=self.engine.stalled_seconds,
            counters=counters,
        )

    def kv_events(self, since: int) -> KVEvents:
        """Which blocks' keys have come and gone since event number `since` (kvcache.blocks.events)."""
        return self._kv_events.since(since)

    def audit_now(self) -> Audit:
        """What the worker holds this moment, and what of it nobody owns."""
        with self.engine.lock:
            owned: dict[int, SequenceState] = {}
            for seq in self._owned():
                owned[id(seq)] = seq
            queued = [seq for scheduler in self.engine.schedulers for seq in scheduler.sequences()]
            decode = self.decode
            counts = {
                "leases": len(decode.table.leases) if decode is not None else 0,
                "blocks": self.blocks.held,
                "sequences": len(queued),
                "streams": decode.receiving if decode is not None else 0,
                "fetches": decode.direct.running if decode is not None else 0,
                "tasks": len(self.prefill.sequences()),
            }
            leaked = {
                "leases": decode.orphans() if decode is not None else 0,
                "blocks": self.kv.unaccounted(owned.values(), self.connector.table() if self.connector else ()),
                "tasks": sum(id(seq) not in owned for seq in queued),
            }
            if self.kv.host is not None:
                counts["host_extents"] = self.kv.host.extents.held
                leaked["host_extents"] = self.kv.host.unaccounted(
                    owned.values(), self.connector.extents() if self.connector else ()
                )
        return Audit(service=self.identity.name, counts=counts, leaked=leaked)

    def _owned(self) -> list[SequenceState]:
        doors = [door for door in (self.decode, self.prefill) if door is not None]
        return [*(seq for door in doors for seq in door.sequences()), *self.engine.flying]


def context_limit(model: LoadedModel, config: ModelConfig, pool_tokens: int) -> int:
    """Tokens a sequence may have: what the model, the configuration and the KV pool allow. Raises ValueError."""
    allowed = model.spec.max_position
    if config.max_model_len is not None:
        if config.max_model_len > allowed:
            raise ValueError(f"--max-model-len {config.max_model_len} is more than the model's {allowed} tokens")
        allowed = config.max_model_len
    return min(allowed, pool_tokens)


def host_plan(specs: tuple[LayerKV, ...], config: EngineConfig, blocks: int) -> OffloadPlan | None:
    """How the host memory asked for is used; None where there is none. Raises ValueError where it cannot be."""
    if not config.host_kv_memory:
        return None
    return plan_host(specs, blocks, config.block_size, config.host_kv_memory)


def trace_path(path: str, worker: str) -> Path:
    """The file a worker traces to: steps.json becomes steps.decode-0.json, so that workers do not share one."""
    asked = Path(path)
    return asked.with_name(f"{asked.stem}.{worker}{asked.suffix or '.json'}")


@lru_cache(maxsize=64)
def layout_fingerprint(model: str, specs: tuple[LayerKV, ...], form: str) -> str:
    """Hex; equal only for the same weights, KV layout and, where bits are promised, form of computing."""
    return hashlib.sha256(f"{model}|{specs!r}|{form}".encode()).hexdigest()[:32]
