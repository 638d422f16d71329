"""What the autoscaler may do and when: how many workers, at what load, and how long that must have been so.

Windows, tolerance and cool-down carry the names of Kubernetes' HorizontalPodAutoscaler where it has the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from serving.messages import Role

MOST_WORKERS = 1 << 20


@dataclass(frozen=True, slots=True)
class RoleLimits:
    """At least `least` workers of a role, at most `most`."""

    least: int = 1
    most: int = MOST_WORKERS

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"{self.least} to {self.most} workers: at least 1, and no more than the most")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalerLimits:
    """Seconds; shares of what a role's workers can do. Raises ValueError for limits that contradict each other.

    A role is short where its load was above `scale_up` in every observation of `scale_up_window`; above `flip_below`,
    where an objective is met by fewer than `attainment`. It has one worker too many where its load with one fewer was
    below `scale_down` all through `scale_down_window`. A role that gives a worker to another has a load of
    `flip_below` afterwards, or less. `interval` lies between two observations; one older than
    `stale` is not acted on. After an action nothing is done for `cool_down`.
    """

    roles: Mapping[Role, RoleLimits] = field(default_factory=dict)
    most_workers: int = MOST_WORKERS
    attainment: float = 0.9
    scale_up: float = 0.75
    scale_down: float = 0.45
    scale_up_window: float = 60.0
    scale_down_window: float = 300.0
    cool_down: float = 120.0
    interval: float = 15.0
    flips: bool = True

    def __post_init__(self) -> None:
        seconds = (self.interval, self.scale_up_window, self.scale_down_window, self.cool_down)
        if not all(isfinite(each) and each >= 0 for each in seconds) or self.interval == 0:
            raise ValueError("windows, cool-down and interval are seconds from 0, and the interval more than 0")
        if not 0 < self.scale_down < self.scale_up <= 1:
            raise ValueError("between 0 and 1, scale down at a lower load than scale up: roles would flap")
        if not 0 < self.attainment <= 1:
            raise ValueError("attainment is a share of requests, above 0 and at most 1")
        if not 2 * self.interval <= self.scale_up_window <= self.scale_down_window:
            raise ValueError("the window of scaling up holds two intervals or more, that of scaling down no less")
        if self.cool_down < self.scale_up_window:
            raise ValueError("a cool-down shorter than the window of scaling up acts on what the last action caused")
        either = self.of(Role.PREFILL).least + self.of(Role.DECODE).least, self.of(Role.MIXED).least
        if max(either) > self.most_workers:  # a fleet is scaled as prefill and decode workers, or as mixed ones
            raise ValueError("the least prefill and decode workers, or mixed ones, are more than the most in all")

    def of(self, role: Role) -> RoleLimits:
        return self.roles.get(role, RoleLimits())

    @property
    def flip_below(self) -> float:
        """Halfway between the two."""
        return (self.scale_up + self.scale_down) / 2

    @property
    def stale(self) -> float:
        return 2.5 * self.interval
