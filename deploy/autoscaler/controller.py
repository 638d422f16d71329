"""The loop: ask the router, ask the place, decide, act; then wait for the next turn.

What it decides by is pure (deploy.autoscaler.policy). It needs a clock and a sleep, and knows neither HTTP nor places.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deploy.autoscaler.actuator import KEPT, Actuator, ActuatorError, FleetWorker
from deploy.autoscaler.fleet_load import ScaledFleet
from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.lock import ControllerLock
from deploy.autoscaler.observation import Observation, RouterSample, observed, read_sample
from deploy.autoscaler.policy import (
    Action,
    AddWorker,
    DrainWorker,
    FlipWorker,
    ScalingDecision,
    decide,
    predicted_gain,
)
from serving.autoscaler_metrics import AutoscalerFigures
from serving.errors import MillraceError, Unavailable
from serving.log_lines import FIELDS

log = logging.getLogger(__name__)

Decide = Callable[[Sequence[Observation], ScaledFleet, AutoscalerLimits, float], ScalingDecision]
STANDBY = "another autoscaler is at work: standing by"


class RouterSource(Protocol):
    """Where the router's figures come from."""

    async def read(self) -> Any:
        """What GET /v1/workers answers. Raises MillraceError."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """What the loop is given: where figures come from, who acts, who else might, time, and what decides."""

    source: RouterSource
    actuator: Actuator
    lock: ControllerLock
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    decide: Decide = decide


class AutoscaleController:
    """One turn every `limits.interval` seconds. With `dry_run` it says what it would do, and takes it as done."""

    def __init__(self, wiring: Wiring, limits: AutoscalerLimits, *, dry_run: bool = False):
        self.wiring = wiring
        self.limits = limits
        self.dry_run = dry_run
        self.figures = AutoscalerFigures()
        self.observations: deque[Observation] = deque()
        self._before: tuple[RouterSample, float] | None = None
        self._fleet: ScaledFleet | None = None
        self._told = ""
        self._healthy = True

    async def run(self) -> None:
        """Until it is cancelled; a router or a place that does not answer is asked again."""
        try:
            while True:
                await self.turn()
                await self.wiring.sleep(self.limits.interval)
        finally:
            await self.wiring.lock.release()

    def health(self) -> tuple[bool, str]:
        """Whether the last turn got its figures, and what it came to."""
        return self._healthy, self._told or "ok"

    async def turn(self) -> ScalingDecision:
        """Look, decide, act once. Raises nothing of the error tree."""
        self.figures.turns += 1
        failures = self.figures.failures
        try:
            decision = await self._decide()
        except MillraceError as error:
            self.figures.failures += 1
            self._without_flips(error)  # one that failed long after it was asked for is told of now
            decision = ScalingDecision(None, error.message)
        self._healthy = self.figures.failures == failures
        self._tell(decision)
        if decision.action is not None:
            await self._act(decision.action)
        return decision

    async def _decide(self) -> ScalingDecision:
        away = await self._observe()
        workers = tuple(await self.wiring.actuator.workers())
        self._see(workers)
        assert self._fleet is not None
        if not await self.wiring.lock.held():
            self.figures.leading = False
            return ScalingDecision(None, STANDBY)
        self.figures.leading = True
        if away:
            return ScalingDecision(None, away)
        return self.wiring.decide(tuple(self.observations), self._fleet, self.limits, self.wiring.clock())

    async def _observe(self) -> str:
        """One more observation; why there is none, where there is none."""
        try:
            sample = read_sample(await self.wiring.source.read())
        except MillraceError as error:
            self.figures.failures += 1
            return error.message
        now, before = self.wiring.clock(), self._before
        self._before = sample, now
        horizon = now - self.limits.scale_down_window - self.limits.scale_up_window
        while self.observations and self.observations[0].at < horizon:
            self.observations.popleft()
        if before is None or now - before[1] > self.limits.stale:  # what happened meanwhile is not known in time
            return ""
        try:
            self.observations.append(observed(before[0], sample, now))
        except Unavailable as error:
            self.observations.clear()
            return error.message
        return ""

    def _see(self, workers: tuple[FleetWorker, ...]) -> None:
        """When the fleet last changed: from then on the cool-down runs."""
        before = self._fleet
        changed = before.changed_at if before is not None else None
        if any(worker.state != "ready" for worker in workers) or (
            before is not None and set(before.workers) != set(workers)
        ):
            changed = self.wiring.clock()
        self._fleet = ScaledFleet(workers, changed)

    async def _act(self, action: Action) -> None:
        assert self._fleet is not None
        if not self.dry_run:
            try:
                await self._ask(action)
            except ActuatorError as error:
                self._failed(action, error)
                return
        self.figures.acted(kind(action), action.role.value)
        self._fleet = ScaledFleet(self._fleet.workers, self.wiring.clock())

    def _failed(self, action: Action, error: ActuatorError) -> None:
        """It is decided anew with the next turn."""
        self.figures.failures += 1
        log.error("%s failed: %s", told(action), error.message)
        self._without_flips(error)

    def _without_flips(self, error: MillraceError) -> None:
        """From now on, where an action has failed since workers keep their roles."""
        if isinstance(error, ActuatorError) and error.code == KEPT and self.limits.flips:
            self.limits = replace(self.limits, flips=False)
            log.info("workers keep their roles here: only adding and draining from now on")

    async def _ask(self, action: Action) -> None:
        actuator = self.wiring.actuator
        match action:
            case AddWorker(role):
                await actuator.add(role)
            case DrainWorker(worker_id, _):
                await actuator.drain(worker_id)
            case FlipWorker(worker_id, role):
                await actuator.flip(worker_id, role)

    def _tell(self, decision: ScalingDecision) -> None:
        """Every action, and whatever else has changed since it was last said, as a line with fields of its own."""
        load, action = decision.load, decision.action
        fields: dict[str, str | float | bool | None] = {"reason": decision.reason, "dry_run": self.dry_run}
        if load is not None:
            roles = load.fleet.roles
            wanted = load.wanted(self.limits)
            self.figures.loads = {role.value: load.used(role) for role in roles}
            self.figures.wanted = {role.value: wanted[role] for role in roles}
            self.figures.workers = {role.value: load.fleet.count(role) for role in roles}
            fields |= {f"load_{role}": round(load.used(role), 3) for role in roles}
            fields |= {f"wanted_{role}": wanted[role] for role in roles}
        if decision.shift:
            fields["shift"] = decision.shift
        if load is not None and action is not None:
            before, after = predicted_gain(load, action)
            self.figures.predicted = after - before
            fields |= {"action": kind(action), "attainment_now": round(before, 3), "attainment_then": round(after, 3)}
            begin = "would " if self.dry_run else ""
            gain = f"predicted attainment {100 * before:.0f} % → {100 * after:.0f} %"
            shift = f"; traffic has changed: {decision.shift}" if decision.shift else ""
            log.info("%s%s: %s; %s%s", begin, told(action), decision.reason, gain, shift, extra={FIELDS: fields})
        elif decision.reason.partition(":")[0] != self._told:
            log.info("nothing to do: %s", decision.reason, extra={FIELDS: fields})
        self._told = "" if action is not None else decision.reason.partition(":")[0]


def kind(action: Action) -> str:
    return {AddWorker: "add", DrainWorker: "drain", FlipWorker: "flip"}[type(action)]


def told(action: Action) -> str:
    match action:
        case AddWorker(role):
            return f"add a {role} worker"
        case DrainWorker(worker_id, role):
            return f"drain {worker_id} ({role})"
        case FlipWorker(worker_id, role):
            return f"flip {worker_id} to {role}"
