"""Makes the workers of one process, one after the other, around the model that it has loaded.

A life is a worker from its start to its end, with what was opened for it. Which role it has, and when, is not decided
here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from deploy.runtime.settings import Settings, check_ranks
from deploy.worker.build import MakeForward, WorkerLinks, build_worker
from deploy.worker.computing import KeptForward, packed_on
from deploy.worker.proposers import DraftParts, load_draft_parts
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from kvcache.handoff.nixl_device import device_lenders
from kvcache.pool.remote import RemoteNode
from kvcache.transfer.choice import lenders_for, lenders_on_demand
from kvcache.transfer.lent_memory import MemoryLenders
from serving.grpc_tls import GrpcTls
from serving.loader.loading import LoadedModel
from serving.logs import set_worker
from serving.messages import Role

log = logging.getLogger(__name__)

GIVE_BACK_SECONDS = 5.0  # what a call that ends may hold of the memory


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """A running worker, and what `end` closes after it."""

    worker: Worker
    role: Role
    stack: AsyncExitStack

    def kv(self) -> list[weakref.ref[Tensor]]:
        """The planes of its KV, without holding them."""
        return [weakref.ref(plane) for layer in self.worker.context.locations.device.planes for plane in layer]

    async def end(self) -> None:
        """Stop the worker; one that has crashed is left as it is."""
        await self.stack.aclose()


class WorkerMaker:
    """`settings` are the process's own, before what they say of one role alone; `address` is where others reach it."""

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        address: str,
        kv_transport: str,
        tls: GrpcTls | None,
        *,
        make_forward: MakeForward | None = None,
    ):
        self.settings = settings
        self.model = model
        self.address = address
        self.kv_transport = kv_transport
        self.tls = tls
        self._forward = make_forward or KeptForward()
        self._lives = 0

    def check(self, now: Role, role: Role) -> None:
        """May a worker that is `now` be of this role, with the model as it is loaded? Raises ValueError."""
        mine, other = self.settings.model_config.of(now), self.settings.model_config.of(role)
        if mine.rank_flags or other.rank_flags:
            flags = mine.rank_flags or other.rank_flags
            raise ValueError(f"with {flags} a worker keeps its role: drain it, and add a {role} worker")
        check_ranks(self.settings.engine, other, decodes=role is not Role.PREFILL)

    async def drafts(self, role: Role) -> DraftParts:
        """What its drafts are made with. Raises ValueError."""
        config = self.settings.model_config.of(role)
        return await asyncio.to_thread(load_draft_parts, role, self.model, config, self.settings.engine)

    async def make(self, role: Role, drafts: DraftParts, name: str | None, crashed: Callable[[], object]) -> WorkerLife:
        """Build and start a worker; `crashed` is called if its engine dies. Raises ValueError for clashing settings."""
        async with AsyncExitStack() as stack:
            worker = await self._build(role, drafts, name, stack)
            worker.start()
            crash = asyncio.create_task(worker.crashed.wait(), name="crash")
            crash.add_done_callback(lambda task: None if task.cancelled() else crashed())
            stack.callback(crash.cancel)
            return WorkerLife(worker, role, stack.pop_all())

    async def _build(self, role: Role, drafts: DraftParts, name: str | None, stack: AsyncExitStack) -> Worker:
        """The worker with its ways to others, which `stack` closes, and stops it unless it has crashed."""
        settings, key, transport = self.settings, self.settings.cluster.cluster_key, self.kv_transport
        device = packed_on(self.model, settings.model_config.of(role).device)
        dialer = Dialer(cluster_key=key, kv_transport=transport, tls=self.tls, device=device)
        if role is not Role.DECODE:
            await dialer.prepare()
        pool_lenders = lenders_on_demand(transport)
        stack.callback(pool_lenders.close)
        lenders = (
            lenders_for(transport, device_lenders(transport, device)) if role is not Role.PREFILL else MemoryLenders()
        )
        engine = replace(settings.engine, profile=trace_of(settings.engine.profile, self._lives))
        self._lives += 1
        links = WorkerLinks(
            address=self.address,
            dialer=dialer,
            lenders=lenders,
            pool=settings.pool,
            pool_link=lambda node: RemoteNode(node, key, lenders=pool_lenders, tls=self.tls),
        )
        model_config = settings.model_config.of(role)
        async with AsyncExitStack() as ways:
            ways.callback(lenders.close)
            ways.push_async_callback(dialer.close)
            worker = build_worker(
                *(role, self.model, model_config, engine, links),
                name=name,
                drafts=drafts,
                make_forward=self._forward,
            )
            stack.push_async_callback(_stop, worker)
            stack.push_async_exit(ways.pop_all())
        set_worker(role.value, worker.identity.generation)
        return worker


def trace_of(asked: str | None, life: int) -> str | None:
    """Where the steps of a worker's `life`, from 0, are traced: each has a file, steps.json and then steps.1.json."""
    if asked is None or life == 0:
        return asked
    path = Path(asked)
    return str(path.with_name(f"{path.stem}.{life}{path.suffix or '.json'}"))


async def _stop(worker: Worker) -> None:
    """A crashed worker's engine and pool connector are left as they are."""
    if not worker.loop.crashed:
        await worker.stop()


async def give_back_kv(kept: Sequence[weakref.ref[Tensor]]) -> None:
    """Wait until the KV memory of a worker that has ended, these planes, is free.

    Its parts hold each other, and go when the collector finds them; calls of others that just end hold them as well.
    """
    over = time.monotonic() + GIVE_BACK_SECONDS
    while True:
        await asyncio.to_thread(gc.collect)
        held = sum(plane() is not None for plane in kept)
        if not held or time.monotonic() > over:
            break
        await asyncio.sleep(0.05)
    if held:
        log.warning("%d of %d KV planes of the role before are still held", held, len(kept))
