"""Whether to add, drain or flip a worker, and why: `decide`, over a sliding window of observations.

Pure: no clock, no network, no memory between calls. One action at a time; nothing is done on figures that are stale,
missing or of a fleet that is just changing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.autoscaler.actuator import FleetWorker
from deploy.autoscaler.fleet_load import FleetLoad, ScaledFleet
from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.observation import MetricsMissing, Observation, WorkerSeen
from deploy.autoscaler.shift import profile_shift
from serving.messages import Role

REBALANCE = 0.85  # of the higher load: a flip that cannot clear the shortage has to bring it below that
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class AddWorker:
    role: Role


@dataclass(frozen=True, slots=True)
class DrainWorker:
    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class FlipWorker:
    """`role` is the one it has afterwards."""

    worker_id: str
    role: Role


Action = AddWorker | DrainWorker | FlipWorker


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """`reason` says why this, or why nothing. `load` is None where there were no figures to judge by.

    `shift` says how the traffic has changed; empty: it has not.
    """

    action: Action | None
    reason: str
    load: FleetLoad | None = None
    shift: str = ""


def decide(
    observations: Sequence[Observation], fleet: ScaledFleet, limits: AutoscalerLimits, now: float
) -> ScalingDecision:
    """What to do now. `observations` are the newest last, on the same clock as `now`."""
    if reason := unfit(observations, fleet, limits, now):
        return ScalingDecision(None, reason)
    try:
        load = FleetLoad.of(observations, fleet, limits, now)
    except MetricsMissing as error:
        return ScalingDecision(None, error.message)
    shift = profile_shift(observations, limits.scale_up_window)
    for rule in (_within_limits, _more_where_short, _fewer_where_idle):
        if found := rule(load, fleet, limits):
            action, reason = found
            return ScalingDecision(action, reason, load, shift)
    return ScalingDecision(None, f"the fleet fits its load: {load.told()}", load, shift)


# ---- when nothing may be done ----------------------------------------------------------------------------------


def unfit(observations: Sequence[Observation], fleet: ScaledFleet, limits: AutoscalerLimits, now: float) -> str:
    """Why no decision can be made; empty where one can."""
    for worker in fleet.workers:
        if worker.state != "ready":
            return f"{worker.worker_id} is {worker.state}: one change at a time"
    if not fleet.workers:
        return "the place has no workers"
    if fleet.changed_at is not None and now - fleet.changed_at < limits.cool_down:
        left = limits.cool_down - (now - fleet.changed_at)
        return f"cooling down: {left:.0f} s are left since the last change"
    if not observations:
        return "no metrics yet"
    last = observations[-1]
    if not 0 <= now - last.at <= limits.stale:
        return f"metrics are stale: the newest are {now - last.at:.0f} s old"
    recent = [each for each in observations if each.at > now - limits.scale_up_window]
    covered = sum(each.seconds for each in recent)
    if len(recent) < 2 or covered < limits.scale_up_window - 1.5 * limits.interval:
        return f"measuring: {covered:.0f} s of {limits.scale_up_window:.0f} s"
    return _strangers(last.workers, fleet.workers, limits.stale)


def _strangers(seen: Sequence[WorkerSeen], workers: Sequence[FleetWorker], stale: float) -> str:
    """Router and place have to mean the same workers; empty if they do."""
    known = {worker.name: worker for worker in seen}
    for worker in workers:
        told = known.get(worker.worker_id)
        if told is None:
            return f"metrics are missing: the router does not know {worker.worker_id}"
        if told.state != "live":
            return f"metrics are missing: {worker.worker_id} is {told.state} for the router"
        if told.role is not worker.role:
            return f"{worker.worker_id} is {told.role} for the router, and {worker.role} where it runs"
        if told.heard_seconds > stale:
            return f"metrics are stale: {worker.worker_id} was last heard {told.heard_seconds:.0f} s ago"
    ours = {worker.worker_id for worker in workers}
    if others := sorted(worker.name for worker in seen if worker.state == "live" and worker.name not in ours):
        return f"the router has workers that do not run here: {', '.join(others)}"
    return ""


# ---- the rules, in order ---------------------------------------------------------------------------------------


def _within_limits(load: FleetLoad, fleet: ScaledFleet, limits: AutoscalerLimits) -> tuple[Action, str] | None:
    for role in fleet.roles:
        count, allowed = fleet.count(role), limits.of(role)
        if count < allowed.least and len(fleet.workers) < limits.most_workers:
            return AddWorker(role), f"{count} {role} workers, at least {allowed.least}"
        if count > allowed.most:
            return _drained(load, role), f"{count} {role} workers, at most {allowed.most}"
    able = [role for role in fleet.roles if fleet.count(role) > limits.of(role).least]
    if able and len(fleet.workers) > limits.most_workers:  # mixed workers beside others are not scaled
        role = min(able, key=load.used)
        return _drained(load, role), f"{len(fleet.workers)} workers, at most {limits.most_workers} in all"
    return None


def _more_where_short(
    load: FleetLoad, fleet: ScaledFleet, limits: AutoscalerLimits
) -> tuple[Action | None, str] | None:
    """A flip where the sum suffices, else one more, else a flip that at least evens out."""
    short = [role for role in fleet.roles if load.short(role, limits)]
    for role in sorted(short, key=load.least_used, reverse=True):
        why = f"{role} was short for {limits.scale_up_window:.0f} s ({load.why(role)})"
        if found := _more(role, load, fleet, limits):
            action, how = found
            return action, f"{why}; {how}"
    if short:
        return None, f"{', '.join(short)} short, and the limits allow no more: {load.told()}"
    return None


def _more(role: Role, load: FleetLoad, fleet: ScaledFleet, limits: AutoscalerLimits) -> tuple[Action, str] | None:
    donor, room = OTHER.get(role), fleet.count(role) < limits.of(role).most
    flips = limits.flips and room and donor is not None and fleet.count(donor) > limits.of(donor).least
    if flips and donor is not None and load.after(donor, fewer=1) <= limits.flip_below and not load.waits(donor):
        spare = f"{donor} has one to spare: its load would be {load.after(donor, fewer=1):.2f}"
        return FlipWorker(load.idlest(donor).name, role), spare
    if room and len(fleet.workers) < limits.most_workers:
        return AddWorker(role), "no other role has one to spare" if donor is not None else "one more"
    if flips and donor is not None and load.evens_out(donor, role, REBALANCE):
        return FlipWorker(load.idlest(donor).name, role), f"there may be no more workers, and {donor} is less loaded"
    return None


def _fewer_where_idle(load: FleetLoad, fleet: ScaledFleet, limits: AutoscalerLimits) -> tuple[Action, str] | None:
    if not load.covers_scale_down or load.missed:
        return None
    able = [role for role in fleet.roles if fleet.count(role) > limits.of(role).least]
    idle = [role for role in able if load.most_used_with_fewer(role) <= limits.scale_down and not load.waits(role)]
    if not idle:
        return None
    least: Callable[[Role], float] = load.most_used_with_fewer
    role = min(idle, key=least)
    return _drained(load, role), (
        f"{role} had one too many for {limits.scale_down_window:.0f} s: with one fewer its load was at most"
        f" {least(role):.2f}"
    )


def _drained(load: FleetLoad, role: Role) -> DrainWorker:
    return DrainWorker(load.idlest(role).name, role)


# ---- what is told ----------------------------------------------------------------------------------------------


def predicted_gain(load: FleetLoad, action: Action) -> tuple[float, float]:
    """Attainment now and after the action, both predicted."""
    more = {Role.PREFILL: 0, Role.DECODE: 0}
    step = -1 if isinstance(action, DrainWorker) else 1
    for role in more if action.role is Role.MIXED else (action.role,):
        more[role] += step
    if isinstance(action, FlipWorker):
        more[OTHER[action.role]] -= 1
    return load.attainment(), load.attainment(prefill=more[Role.PREFILL], decode=more[Role.DECODE])
