"""Decode, prefill and mixed workers over a scripted runner: real doors, tables, pools and schedulers, but no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.worker import DecodeWorker, RouterSession
from kvcache.blocks.offload import OffloadPlan
from kvcache.handoff.dialer import Dialer
from kvcache.memory.device import DeviceKV
from kvcache.memory.host import HostKV
from kvcache.memory.locations import KVLocations
from prefill.scheduler import PrefillScheduler
from prefill.worker import PrefillWorker
from serving.engine.engine import Engine
from serving.engine.loop import EngineLoop
from serving.engine.plan import Scheduler
from serving.kvspec import LayerKV, gqa
from serving.links import LeaseEvent
from serving.messages import LeaseGrant, LeaseId, Role, WorkerIdentity
from tests.fakes.sequences import make_order
from tests.prefill.scripted import ScriptedRunner, make_decoding, make_engine, make_kv

SPECS = (gqa(1, 2, "float32"), gqa(1, 2, "float32"))
FINGERPRINT = "model"


def make_identity(role: Role, max_model_len: int) -> WorkerIdentity:
    return WorkerIdentity(
        instance=f"{role}-life",
        name=f"{role}-0",
        role=role,
        model="model",
        fingerprint=FINGERPRINT,
        pairing=FINGERPRINT,
        kv_dtype="float32",
        max_model_len=max_model_len,
    )


class Worker:
    """Both doors over one engine, whatever the role; a test starts the engine's thread or steps by hand."""

    def __init__(
        self,
        role: Role,
        *,
        blocks: int = 32,
        size: int = 4,
        tokens: int = 8,
        seqs: int = 8,
        specs: tuple[LayerKV, ...] = SPECS,
        host: OffloadPlan | None = None,
    ):
        self.kv = make_kv(blocks, size, host=host)
        self.device_kv = DeviceKV(specs, blocks, size)
        self.host_kv = HostKV(host, self.device_kv, [None] * len(specs)) if host is not None else None
        self.dialer = Dialer()
        self.decoding = make_decoding(self.kv)
        self.prefilling = PrefillScheduler(self.kv, then=self.decoding.add)
        self.engine: Engine
        self.runner: ScriptedRunner
        schedulers: list[Scheduler] = [self.decoding, self.prefilling]
        limit = host.tokens if host is not None else blocks * size
        self.engine, self.runner = make_engine(self.kv, schedulers, tokens=tokens, seqs=seqs, max_model_len=limit)
        self.loop = EngineLoop(self.engine)
        self.identity = make_identity(role, limit)
        locations = KVLocations(self.device_kv, self.host_kv, self.engine.lock)
        self.decode = DecodeWorker(
            identity=self.identity,
            loop=self.loop,
            kv=self.kv,
            device_kv=self.device_kv,
            locations=locations,
            scheduler=self.decoding,
            long_rope=lambda tokens: False,
            address="local:decode",
            wanted=self.prefilling.wanted_blocks,
        )
        self.prefill = PrefillWorker(
            identity=self.identity,
            loop=self.loop,
            kv=self.kv,
            device_kv=self.device_kv,
            locations=locations,
            scheduler=self.prefilling,
            long_rope=lambda tokens: False,
            dialer=self.dialer,
            layout=lambda kv_dtype: (FINGERPRINT, specs),
            leases=self.decode if role is Role.MIXED else None,
        )
        self.events: list[LeaseEvent] = []

    async def session(self) -> RouterSession:
        return await self.decode.connect("router", self.events.extend, lambda error: None)

    def fence(self, lease: str = "r/1", epoch: int = 0) -> LeaseId:
        return LeaseId(lease=lease, epoch=epoch, instance=self.identity.instance)

    async def lease(
        self, session: RouterSession, prompt: Sequence[int], lease: str = "r/1", **fields: Any
    ) -> LeaseGrant:
        return await session.open(make_order(prompt, lease=self.fence(lease), **fields))

    def step(self) -> None:
        """One step, delivered as the engine's thread would have it delivered."""
        outputs = self.engine.step()
        if outputs:
            self.loop._deliver(outputs)

    def idle(self) -> bool:
        held = [*self.decode.sequences(), *self.prefill.sequences(), *self.prefilling.queue, *self.decoding.running]
        extents = self.kv.host.extents.held if self.kv.host is not None else 0
        return self.kv.allocator.held == extents == 0 and not held and self.decode.receiving == 0
