"""A cluster as it serves, on a virtual loop: production router and workers over modelled computing, KV and wire.

It builds, starts and stops them and lets them beat. What is asked of them, and what came of it, is not its affair.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from deploy.runtime.heartbeats import NEWS_AFTER, NEWS_GAP
from deploy.simulator.drafts import DraftModel, ModelledProposer
from deploy.simulator.engine_loop import VirtualEngineLoop
from deploy.simulator.network import ModelledDialer, ModelledLink, NetworkModel, Ports
from deploy.simulator.profiles import Profile
from deploy.simulator.runner import ModelledRunner, lognormal
from deploy.simulator.step_records import Noise, RecordedNoise, VariedStep
from deploy.simulator.texts import EOS, ScriptedTexts
from deploy.worker.build import ModelParts, WorkerLinks, assemble
from deploy.worker.worker import Worker
from kvcache.handoff.local import Receiver
from kvcache.memory.device import DeviceKV
from kvcache.memory.locations import KVLocations
from router.fleet import Fleet, RouterConfig, WorkerLink
from router.placer import Placer
from router.policies import POLICIES, make_policy
from router.router import Router, RouterObserver
from serving.config import EngineConfig
from serving.engine.step_prior import UNKNOWN
from serving.errors import MillraceError
from serving.kvspec import LayerKV, Plane
from serving.messages import Audit, Role, WorkerIdentity, WorkerStatus

AT_THE_END = 1 << 30  # tokens: no text has as many, so those between its second and its last come with the last
LOG_TIMES = 4  # a worker's KV events that are remembered, for each block: more than come between two heartbeats
TOKEN_KV = (LayerKV("modelled", (Plane("kv", (1,), "uint8"),)),)  # a byte a token: chunks and digests stay small


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """Which workers there are, of what model and hardware, and how requests come to them.

    `of_role` are the profiles of roles whose hardware is not that of `profile`; the model is the same.
    `noise` is the standard deviation of the logarithm of a step's seconds, `noise_of` that of roles with another; steps
    of roles in `steps_of` vary as recorded instead.
    Beats come every `heartbeat_interval` seconds from each worker, spread over the interval. `engine` may set all but
    the KV's size, which is the profile's unless it gives a number of blocks. Each of the `routers` hears every beat,
    and knows of no other router. Workers with `drafts` try as many tokens at a time as `engine` says. `front_seconds`
    pass between a client and the router, before the first token: the API's work and the way of both. `learned`:
    workers begin with what the profile says of their steps, as those do that have served before, not with a guess.
    """

    roles: tuple[Role, ...]
    profile: Profile
    engine: EngineConfig
    router: RouterConfig = field(default_factory=RouterConfig)
    network: NetworkModel = field(default_factory=NetworkModel)
    noise: float = 0.05
    heartbeat_interval: float = 0.5
    of_role: Mapping[Role, Profile] = field(default_factory=dict)
    noise_of: Mapping[Role, float] = field(default_factory=dict)
    steps_of: Mapping[Role, tuple[VariedStep, ...]] = field(default_factory=dict)
    routers: int = 1
    drafts: DraftModel | None = None
    front_seconds: float = 0.0
    learned: bool = False

    def __post_init__(self) -> None:
        if models := {each.model for each in self.of_role.values()} - {self.profile.model}:
            raise ValueError(f"workers of {self.profile.model} cannot hand KV to workers of {', '.join(models)}")

    def hardware(self, role: Role) -> Profile:
        return self.of_role.get(role, self.profile)

    def blocks(self, role: Role) -> int:
        return self.engine.num_kv_blocks or self.hardware(role).kv_tokens // self.engine.block_size

    def with_drafts(self, drafts: DraftModel) -> ClusterPlan:
        """The same, drafting as many tokens at a time as workers do by default."""
        most = EngineConfig().num_speculative_tokens
        return replace(self, drafts=drafts, engine=replace(self.engine, num_speculative_tokens=most))

    @staticmethod
    def of(profile: Profile, roles: tuple[Role, ...], policy: str, **fields: Any) -> ClusterPlan:
        """The profile's limits for a step, no drafts, and everything else as it is by default."""
        engine = EngineConfig(
            max_num_seqs=profile.max_num_seqs,
            max_num_batched_tokens=profile.max_num_batched_tokens,
            num_speculative_tokens=0,
        )
        return ClusterPlan(
            **{"roles": roles, "profile": profile, "engine": engine, "router": RouterConfig(policy=policy), **fields}
        )


class SimulatedCluster:
    """Router and workers of a plan on the running virtual loop. Use as an async context manager.

    `seed` draws the noise of the steps; `placed` is told where requests go (deploy.simulator.network).
    """

    def __init__(
        self, plan: ClusterPlan, texts: ScriptedTexts, seed: int, placed: Callable[[str, str, str], None] | None = None
    ):
        self.plan = plan
        self.texts = texts
        self.seed = seed
        self.placed = placed or (lambda request, worker, side: None)
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        self.fleets = [Fleet(plan.router, self._link, clock=self.clock) for _ in range(plan.routers)]
        for fleet in self.fleets:
            fleet.suspect = partial(self._suspect, fleet.suspect)  # type: ignore[method-assign]
        self.placers = [Placer(fleet, make_policy(plan.router.policy)) for fleet in self.fleets]
        self._recorded = {role: RecordedNoise(steps, 0) for role, steps in plan.steps_of.items()}
        self.workers: dict[str, Worker] = {}  # by instance
        self._receivers: dict[str, Receiver] = {}
        self._ports = Ports()
        self._links: dict[str, list[ModelledLink]] = {}  # of each router, by instance
        self.serving: list[Router] = []
        self._beats: list[asyncio.Task[None]] = []
        self._told_at: dict[str, float] = {}  # by instance: when routers are, or were, last told of new prompts
        self._hearts: dict[str, asyncio.Task[None]] = {}  # what beats for each worker, by instance

    def routers(self, observer: RouterObserver) -> list[Router]:
        self.serving = [Router(placer, observer) for placer in self.placers]
        return self.serving

    async def start(self) -> None:
        for number, role in enumerate(self.plan.roles):
            worker = self._worker(role, number)
            self.workers[worker.identity.instance] = worker
            worker.start()
            self._beat(worker)
        interval, count = self.plan.heartbeat_interval, len(self.workers)
        for number, worker in enumerate(self.workers.values()):
            first = interval * (number + 1) / count
            self._keep_beating(worker, first)
        for fleet in self.fleets:
            self._repeat(interval, interval, fleet.expire)

    def join(self, role: Role, name: str, life: str) -> Worker:
        """A worker that comes while others serve. `life` tells it from an earlier one of its name."""
        worker = self._worker(role, len(self._hearts), name, life)
        self.workers[worker.identity.instance] = worker
        worker.start()
        self._beat(worker)
        self._keep_beating(worker, self.plan.heartbeat_interval)
        return worker

    async def leave(self, worker: Worker, seconds: float) -> None:
        """It drains as one in a process does, and beats meanwhile; then it is gone."""
        draining = asyncio.create_task(worker.drain(seconds))
        await asyncio.sleep(0)
        self._beat(worker)
        await draining
        self._hearts[worker.identity.instance].cancel()
        self.workers.pop(worker.identity.instance)
        if self._receivers.get(worker.address) is worker.decode:
            self._receivers.pop(worker.address, None)
        await worker.stop()

    def _keep_beating(self, worker: Worker, first: float) -> None:
        interval = self.plan.heartbeat_interval
        if len(self.fleets) > 1:
            worker.prefill.arrived = partial(self._tell_news, worker)
        self._hearts[worker.identity.instance] = self._repeat(first, interval, lambda: self._beat(worker))

    def _repeat(self, first: float, interval: float, what: Callable[[], None]) -> asyncio.Task[None]:
        async def repeat() -> None:
            await asyncio.sleep(first)
            while True:
                what()
                await asyncio.sleep(interval)

        self._beats.append(asyncio.create_task(repeat()))
        return self._beats[-1]

    def _worker(self, role: Role, number: int, name: str = "", life: str = "life") -> Worker:
        plan, profile, name = self.plan, self.plan.hardware(role), name or f"{role}-{number}"
        address = f"simulated:{name}"
        config, blocks = plan.engine, plan.blocks(role)
        identity = WorkerIdentity(
            instance=f"{name}-{life}",
            name=name,
            role=role,
            model=profile.model,
            fingerprint=profile.model,
            pairing=profile.model,
            kv_dtype="bfloat16",
            max_model_len=min(profile.max_model_len, blocks * config.block_size),
        )
        runner = ModelledRunner(profile, self.texts, self._noise(role, self.seed * 4096 + number, identity.instance))
        parts = ModelParts(
            runner=runner,
            eos_token_ids=frozenset({EOS}),
            layout=lambda kv_dtype: (profile.model, TOKEN_KV),
            guess=profile.learned() if plan.learned else UNKNOWN,
            proposer=ModelledProposer(plan.drafts, self.texts) if plan.drafts is not None else None,
        )
        dialer = ModelledDialer(address, self._receivers, self._ports, plan.network, profile.kv_bytes)
        worker = assemble(
            identity,
            config,
            KVLocations(DeviceKV(TOKEN_KV, blocks, config.block_size), None, threading.RLock()),
            parts,
            WorkerLinks(address=address, dialer=dialer),
            clock=self.clock,
            engine_loop=lambda engine: VirtualEngineLoop(engine, leaving=1 / profile.layers),
            tell_every=AT_THE_END if plan.drafts is None else 1,
            kv_events=LOG_TIMES * blocks if POLICIES[plan.router.policy].needs_prefixes else 0,
        )
        if worker.decode is not None:
            self._receivers[address] = worker.decode
        return worker

    def _noise(self, role: Role, seed: int, instance: str) -> Noise:
        recorded = self._recorded.get(role)
        if recorded is not None:
            return recorded.again(seed, partial(self._others_compute, instance))
        return lognormal(self.plan.noise_of.get(role, self.plan.noise), seed)

    def _others_compute(self, instance: str) -> bool:
        """Whether a worker beside this one is in the middle of a step."""
        return any(_loop_of(worker).computing for name, worker in self.workers.items() if name != instance)

    def _link(self, status: WorkerStatus) -> WorkerLink:
        seconds = self.plan.network.message_seconds
        worker = self.workers[status.instance]
        link = ModelledLink(worker, status.name, seconds, self.placed, partial(self._steps_since, worker))
        self._links.setdefault(status.instance, []).append(link)
        return link

    def _steps_since(self, worker: Worker, at: float) -> int:
        """How many steps of the worker have ended later: their tokens may still be on their way."""
        return _loop_of(worker).ended_since(at)

    async def catch_up(self) -> None:
        """Let routers have the tokens that have come by now: call before counting what they have."""
        for links in self._links.values():
            for link in links:
                link.flush()
        await asyncio.sleep(0)

    def _suspect(self, suspect: Callable[[str, MillraceError], None], instance: str, error: MillraceError) -> None:
        """A router gives a worker up: what has come from it before is seen first."""
        for link in self._links.get(instance, ()):
            link.flush()
        suspect(instance, error)

    def _tell_news(self, worker: Worker) -> None:
        """Routers are told soon of prompts that others have sent, as by a worker in a process."""
        instance, now = worker.identity.instance, self.clock()
        if self._told_at.get(instance, -inf) > now:
            return  # they are about to be
        at = self._told_at[instance] = max(now + NEWS_AFTER, self._told_at.get(instance, -inf) + NEWS_GAP)
        asyncio.get_running_loop().call_at(at, self._beat_if_there, worker)

    def _beat_if_there(self, worker: Worker) -> None:
        if self.workers.get(worker.identity.instance) is worker:
            self._beat(worker)

    def _beat(self, worker: Worker) -> None:
        for fleet in self.fleets:
            since = fleet.kv_events_since(worker.identity.instance)
            fleet.heartbeat(worker.status(), None if since is None else worker.kv_events(since))

    def audits(self) -> list[Audit]:
        """What every worker holds."""
        return [worker.audit_now() for worker in self.workers.values()]

    async def stop(self) -> None:
        for beat in self._beats:
            beat.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        for fleet in self.fleets:
            await fleet.close()
        for worker in self.workers.values():
            await worker.stop()

    async def __aenter__(self) -> SimulatedCluster:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _loop_of(worker: Worker) -> VirtualEngineLoop:
    assert isinstance(worker.loop, VirtualEngineLoop)
    return worker.loop
