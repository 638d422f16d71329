"""Decode, prefill and mixed workers over a scripted runner: real doors, tables, pools and schedulers, but no model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from decode.worker import DecodeWorker, RouterSession
from deploy.worker.build import ModelParts, WorkerLinks, assemble
from kvcache.blocks.offload import OffloadPlan
from kvcache.handoff.dialer import Dialer
from kvcache.memory.device import DeviceKV
from kvcache.memory.host import HostKV
from kvcache.memory.locations import KVLocations
from kvcache.pool.links import PoolLink
from serving.config import EngineConfig
from serving.kvspec import LayerKV, gqa
from serving.links import LeaseEvent
from serving.messages import LeaseGrant, LeaseId, Role, WorkerIdentity
from tests.fakes.sequences import make_order
from tests.prefill.scripted import EOS, ScriptedRunner, make_decoding

SPECS = (gqa(1, 2, "float32"), gqa(1, 2, "float32"))
FINGERPRINT = "model"


def make_identity(role: Role, max_model_len: int, number: int = 0) -> WorkerIdentity:
    return WorkerIdentity(
        instance=f"{role}-life" if not number else f"{role}-{number}-life",
        name=f"{role}-{number}",
        role=role,
        model="model",
        fingerprint=FINGERPRINT,
        pairing=FINGERPRINT,
        kv_dtype="float32",
        max_model_len=max_model_len,
    )


class Worker:
    """A worker of the role, with both doors whatever the role; a test starts the engine's thread or steps by hand."""

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
        number: int = 0,
        pool_link: Callable[[str], PoolLink] | None = None,
    ):
        self.device_kv = DeviceKV(specs, blocks, size)
        self.host_kv = HostKV(host, self.device_kv, [None] * len(specs)) if host is not None else None
        self.runner = ScriptedRunner(size)
        self.identity = make_identity(role, host.tokens if host is not None else blocks * size, number)
        parts = ModelParts(
            runner=self.runner,
            eos_token_ids=frozenset({EOS}),
            layout=lambda kv_dtype: (FINGERPRINT, specs),
        )
        self.worker = assemble(
            self.identity,
            EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs, num_speculative_tokens=0),
            KVLocations(self.device_kv, self.host_kv, threading.RLock()),
            parts,
            WorkerLinks(address="local:decode", dialer=Dialer(), pool_link=pool_link),
            clock=lambda: 0.0,
        )
        self.kv, self.engine, self.loop = self.worker.kv, self.worker.engine, self.worker.loop
        self.prefill = self.worker.prefill
        self.prefilling = self.prefill.scheduler
        self.decode = self.worker.decode or DecodeWorker(self.worker.context, make_decoding(self.kv), "local:decode")
        self.decoding = self.decode.scheduler
        self.events: list[LeaseEvent] = []

    def start(self) -> None:
        self.loop.start([self.prefill, self.decode], lambda: None)

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
        outputs = self.engine.step() or []
        self.prefill.deliver(outputs)
        self.decode.deliver(outputs)

    def idle(self) -> bool:
        held = [*self.decode.sequences(), *self.prefill.sequences(), *self.prefilling.queue, *self.decoding.running]
        extents = self.kv.host.extents.held if self.kv.host is not None else 0
        return self.kv.allocator.held == extents == 0 and not held and self.decode.receiving == 0
