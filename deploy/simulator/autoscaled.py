"""The autoscaler on virtual time: the loop and the policy that act, over a simulated cluster whose router they watch.

Workers are added, drained and flipped there as real ones are: they drain, end, and come back under a new instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deploy.autoscaler.actuator import ActuatorError, FleetWorker
from deploy.autoscaler.controller import AutoscaleController, Decide, Wiring
from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.observation import RouterSample, read_sample
from deploy.autoscaler.policy import ScalingDecision, decide
from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.run import SimulatedRun, simulate
from deploy.simulator.traffic import Arrival, Traffic, trace
from router.overview import RouterOverview
from serving.messages import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficPhase:
    """So many seconds of one kind of traffic, at one rate."""

    traffic: Traffic
    rate: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeSeconds:
    """What changes of the fleet take: loading a model, serving in another role, draining at most."""

    start: float = 30.0
    flip: float = 5.0
    drain: float = 120.0


def phased(phases: Sequence[TrafficPhase], plan: ClusterPlan, seed: int) -> list[Arrival]:
    """Arrivals of one phase after the other; `at` is in seconds."""
    found: list[Arrival] = []
    begin = 0.0
    for number, phase in enumerate(phases):
        count = max(1, round(phase.rate * phase.seconds))
        made, stretch = trace(phase.traffic, plan.profile, count, seed * 1000 + number), phase.seconds / count
        found += [replace(each, at=begin + each.at * stretch) for each in made]
        begin += phase.seconds
    return found


class SimulatedPlace:
    """An Actuator over a simulated cluster, and the watcher of its router (RouterSource)."""

    def __init__(self, cluster: SimulatedCluster, takes: ChangeSeconds):
        self.cluster = cluster
        self.takes = takes
        self.overview = RouterOverview(cluster.serving[0])
        self.away = False  # the router does not answer
        self._fleet = {
            worker.identity.name: FleetWorker(worker.identity.name, worker.identity.role, "ready")
            for worker in cluster.workers.values()
        }
        self._lives = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self) -> Any:
        return self.overview.workers()

    async def workers(self) -> Sequence[FleetWorker]:
        return list(self._fleet.values())

    async def add(self, role: Role) -> None:
        self._lives += 1
        name = f"{role}-new-{self._lives}"
        self._fleet[name] = FleetWorker(name, role, "starting")
        self._later(self._start(name, role, self.takes.start))

    async def drain(self, worker_id: str) -> None:
        self._later(self._drain(self._known(worker_id)))

    async def flip(self, worker_id: str, role: Role) -> None:
        self._later(self._flip(self._known(worker_id), role))

    def _known(self, name: str) -> FleetWorker:
        if name not in self._fleet:
            raise ActuatorError(f"there is no worker {name}: ask for the workers again")
        self._fleet[name] = replace(self._fleet[name], state="draining")
        return self._fleet[name]

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, name: str, role: Role, seconds: float) -> None:
        self._lives += 1
        await asyncio.sleep(seconds)
        self.cluster.join(role, name, f"life-{self._lives}")
        self._fleet[name] = FleetWorker(name, role, "ready")

    async def _drain(self, worker: FleetWorker) -> None:
        leaving = next(each for each in self.cluster.workers.values() if each.identity.name == worker.worker_id)
        await self.cluster.leave(leaving, self.takes.drain)
        del self._fleet[worker.worker_id]

    async def _flip(self, worker: FleetWorker, role: Role) -> None:
        await self._drain(worker)
        self._fleet[worker.worker_id] = FleetWorker(worker.worker_id, role, "starting")
        await self._start(worker.worker_id, role, self.takes.flip)


@dataclass(slots=True)
class AutoscaledRun:
    """What came of the requests, and every decision with its virtual time; `samples` are what the router said."""

    run: SimulatedRun
    decisions: list[tuple[float, ScalingDecision]] = field(default_factory=list)
    fleets: list[tuple[float, tuple[FleetWorker, ...]]] = field(default_factory=list)
    samples: list[RouterSample] = field(default_factory=list)

    @property
    def actions(self) -> list[tuple[float, ScalingDecision]]:
        return [(at, decision) for at, decision in self.decisions if decision.action is not None]


class _Lock:
    """There is one controller."""

    async def held(self) -> bool:
        return True

    async def release(self) -> None:
        """Nothing is held."""


def autoscaled(
    plan: ClusterPlan,
    arrivals: Sequence[Arrival],
    limits: AutoscalerLimits,
    *,
    seed: int = 0,
    dry_run: bool = False,
    takes: ChangeSeconds | None = None,
    decide: Decide = decide,
) -> AutoscaledRun:
    """Play the arrivals to a cluster that a controller scales. Deterministic. Raises what the controller raises."""
    decisions: list[tuple[float, ScalingDecision]] = []
    fleets: list[tuple[float, tuple[FleetWorker, ...]]] = []
    samples: list[RouterSample] = []
    broken: list[Exception] = []

    async def watch(cluster: SimulatedCluster) -> None:
        place = SimulatedPlace(cluster, takes or ChangeSeconds())
        wiring = Wiring(
            source=place, actuator=place, lock=_Lock(), clock=cluster.clock, sleep=asyncio.sleep, decide=decide
        )
        controller = AutoscaleController(wiring, limits, dry_run=dry_run)
        try:
            while True:
                fleets.append((cluster.clock(), tuple(await place.workers())))
                samples.append(read_sample(await place.read()))
                decisions.append((cluster.clock(), await controller.turn()))
                await asyncio.sleep(limits.interval)
        except Exception as error:  # nobody waits for a watcher
            broken.append(error)
            raise

    run = simulate(plan, arrivals, 1.0, seed=seed, watch=watch)
    if broken:
        raise broken[0]
    return AutoscaledRun(run, decisions, fleets, samples)
