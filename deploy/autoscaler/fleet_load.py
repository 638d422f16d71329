"""How loaded each role is: what was offered, and what was in use, against the workers there are.

Pure arithmetic over a window of observations; what to do about it is deploy.autoscaler.policy's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from deploy.autoscaler.actuator import FleetWorker
from deploy.autoscaler.demand import (
    RoleNeed,
    TrafficProfile,
    WorkerCapacity,
    measured_use,
    role_need,
    traffic_profile,
    worker_capacity,
)
from deploy.autoscaler.gain import predicted_attainment
from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.observation import Observation, WorkerSeen, merged
from serving.messages import Role

JUDGED = 10  # requests of a class, from which on their attainment says something
QUEUE_SECONDS = 1.0  # of prompts, each prefill worker's share: a role with more in its queue has nothing to spare
NOTHING = RoleNeed(prefill=0.0, decode=0.0)


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """The workers of a place. `changed_at`: when the last action was seen to be over; None: not since this began."""

    workers: tuple[FleetWorker, ...]
    changed_at: float | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those that are scaled: mixed workers only where there are no others."""
        there = {worker.role for worker in self.workers}
        return tuple(role for role in (Role.PREFILL, Role.DECODE) if role in there) or (Role.MIXED,)

    def count(self, role: Role) -> int:
        return sum(worker.role is role for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Interval:
    """One observation: what was offered in it, what over the whole window up to its end, and what was in use."""

    offered: RoleNeed
    lately: RoleNeed
    used: RoleNeed


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLoad:
    """`recent` are the intervals of the window of scaling up, `past` those of scaling down; `profile`, `capacity` and
    `need` are of the whole recent window. `missed` tells which objective is met too seldom: TTFT, TPOT.
    """

    fleet: ScaledFleet
    recent: Sequence[Interval]
    past: Sequence[Interval]
    covers_scale_down: bool
    last: Observation
    profile: TrafficProfile
    capacity: WorkerCapacity
    need: RoleNeed
    attained: Mapping[str, tuple[float | None, float | None]]  # by class, of TTFT and TPOT; None: too few to tell
    missed: frozenset[str]
    workers: Mapping[Role, float] = field(default_factory=dict)  # by role, mixed ones shared out

    @staticmethod
    def of(observations: Sequence[Observation], fleet: ScaledFleet, limits: AutoscalerLimits, now: float) -> FleetLoad:
        """Raises MetricsMissing."""
        up, down = now - limits.scale_up_window, now - limits.scale_down_window
        seen = [each for each in observations if each.at > down]
        window = merged([each for each in seen if each.at > up])
        profile, last = traffic_profile(window), observations[-1]
        capacity = worker_capacity(last.workers, profile)
        since = fleet.changed_at if fleet.changed_at is not None else -inf
        past = [(each.at, _interval(each, seen, limits, last.workers, since)) for each in seen]
        need = role_need(window, profile, capacity)
        attained = {name: _attained(window, name) for name in window.work}
        covered = sum(each.seconds for each in seen)
        return FleetLoad(
            fleet=fleet,
            recent=[interval for at, interval in past if at > up],
            past=[interval for _, interval in past],
            covers_scale_down=covered >= limits.scale_down_window - 1.5 * limits.interval,
            last=last,
            profile=profile,
            capacity=capacity,
            need=need,
            attained=attained,
            missed=_missed(attained, limits.attainment),
            workers=_shared_out(fleet, need),
        )

    # ---- shares of what a role's workers can do --------------------------------------------------------------------

    def least_used(self, role: Role) -> float:
        """The least of the recent loads: all were at least that. Where an objective is missed, what was measured
        counts too.
        """
        return min(self._used(role, interval) for interval in self.recent) / self._workers(role)

    def _used(self, role: Role, interval: Interval) -> float:
        offered = interval.offered.of(role)
        return max(offered, interval.used.of(role)) if self.blamed(role) else offered

    def blamed(self, role: Role) -> bool:
        """True if an objective is missed that this role has a part in. A first token may wait for a lease."""
        return bool(self.missed if role is not Role.PREFILL else self.missed & {"TTFT"})

    def short(self, role: Role, limits: AutoscalerLimits) -> bool:
        """Its load was too high in each recent interval: too high for an objective that is missed, or for any."""
        return self.least_used(role) > (limits.flip_below if self.blamed(role) else limits.scale_up)

    def used(self, role: Role) -> float:
        return self._lately(role) / self._workers(role)

    def after(self, role: Role, *, fewer: int) -> float:
        return _share(self._lately(role), self._workers(role) - fewer)

    def _lately(self, role: Role) -> float:
        """The offered work, and no less than was in use."""
        return max(self.need.of(role), sum(each.used.of(role) for each in self.recent) / len(self.recent))

    def most_used_with_fewer(self, role: Role) -> float:
        """The most of the past loads, had there been one worker fewer."""
        most = max(max(each.lately.of(role), each.used.of(role)) for each in self.past)
        return _share(most, self._workers(role) - 1)

    def evens_out(self, donor: Role, role: Role, ratio: float) -> bool:
        """True if a flip had brought the higher of the two loads below `ratio` of it in every recent interval."""
        ours, theirs = self._workers(role), self._workers(donor)
        return all(
            max(self._used(role, each) / (ours + 1), _share(each.offered.of(donor), theirs - 1))
            <= ratio * max(self._used(role, each) / ours, each.offered.of(donor) / theirs)
            for each in self.recent
        )

    def _workers(self, role: Role) -> float:
        return max(self.workers.get(role, 0.0), 1e-9)

    def waits(self, role: Role) -> bool:
        """True if work waits for this role: prompts in its workers' queues, or requests without a place, which are
        decode workers' affair only where these are in use.
        """
        if role is Role.PREFILL:
            queued = sum(worker.queued_tokens for worker in self.last.workers if worker.role is role)
            return queued * self.capacity.prefill.token > QUEUE_SECONDS * self._workers(role)
        return self.last.waiting > 0 and 2 * self.recent[-1].used.of(role) > self._workers(role)

    def idlest(self, role: Role) -> WorkerSeen:
        """The worker of the role with the least to drain."""
        able = [worker for worker in self.last.workers if worker.role is role and worker.state == "live"]
        return min(able, key=lambda worker: (worker.leases, worker.queued_tokens, worker.kv_usage, worker.name))

    # ---- what is told ----------------------------------------------------------------------------------------------

    def attainment(self, prefill: int = 0, decode: int = 0) -> float:
        """Predicted, with so many workers more of each role."""
        ours = self._workers(Role.PREFILL) + prefill, self._workers(Role.DECODE) + decode
        return predicted_attainment(self.profile, self.capacity, self.need, *ours)

    def wanted(self, limits: AutoscalerLimits) -> dict[Role, int]:
        """The split that the cost model asks for, at the load that scaling up begins at."""
        return {
            role: min(limits.of(role).most, max(limits.of(role).least, ceil(self.need.of(role) / limits.scale_up)))
            for role in self.fleet.roles
        }

    def told(self) -> str:
        return ", ".join(f"{role} {self.used(role):.2f} of {self.fleet.count(role)}" for role in self.fleet.roles)

    def why(self, role: Role) -> str:
        profile = self.profile
        output = f"{profile.output:.0f}" if profile.output is not None else "?"
        text = (
            f"load at least {self.least_used(role):.2f}; {profile.rate:.2f} requests/s of {profile.prompt:.0f}+{output}"
        )
        return text + (f" tokens; {' and '.join(sorted(self.missed))} missed" if self.missed else " tokens")


def _interval(
    each: Observation,
    seen: Sequence[Observation],
    limits: AutoscalerLimits,
    workers: Sequence[WorkerSeen],
    since: float,
) -> Interval:
    """With lengths as they were up to then, and workers as they are now. What was in use before the last change says
    nothing of this fleet.
    """
    lately = merged([one for one in seen if each.at - limits.scale_up_window < one.at <= each.at])
    profile = traffic_profile(lately)
    capacity = worker_capacity(workers, profile)
    used = measured_use(each, capacity) if each.at - each.seconds >= since else NOTHING
    return Interval(role_need(each, profile, capacity), role_need(lately, profile, capacity), used)


def _attained(window: Observation, name: str) -> tuple[float | None, float | None]:
    work = window.work[name]
    ttft = work.ttft_met / work.ttft_judged if work.ttft_judged >= JUDGED else None
    return ttft, work.tpot_met / work.tpot_judged if work.tpot_judged >= JUDGED else None


def _missed(attained: Mapping[str, tuple[float | None, float | None]], least: float) -> frozenset[str]:
    ttfts, tpots = [each for each, _ in attained.values()], [each for _, each in attained.values()]
    found = {"TTFT": ttfts, "TPOT": tpots}
    return frozenset(
        name for name, shares in found.items() if any(share is not None and share < least for share in shares)
    )


def _shared_out(fleet: ScaledFleet, need: RoleNeed) -> dict[Role, float]:
    """Mixed workers do both: each role has its share of their time."""
    mixed, both = fleet.count(Role.MIXED), need.prefill + need.decode
    share = need.prefill / both if both else 0.5
    return {
        Role.PREFILL: fleet.count(Role.PREFILL) + share * mixed,
        Role.DECODE: fleet.count(Role.DECODE) + (1 - share) * mixed,
        Role.MIXED: float(mixed),
    }


def _share(need: float, workers: float) -> float:
    """Of workers that may not be there."""
    if workers > 1e-9:
        return need / workers
    return inf if need else 0.0
