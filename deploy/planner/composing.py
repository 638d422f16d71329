"""What a placement would attain if its phases were alone: rates of one worker times their number (DistServe, 4.1).

Pure, and cheap enough for spaces of a hundred thousand placements; what queues behind each other it does not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deploy.planner.front import JudgedValues
from deploy.planner.placements import CandidatePlacement, InstanceGroup
from deploy.planner.rate_search import FoundGoodput

HOURS = 3600.0
MILLION = 1e6


def cost_per_million(devices: int, rate: float, cost: float) -> float:
    """Of a million good requests, at `cost` a device-hour and `rate` good requests a second."""
    return devices * cost / HOURS / rate * MILLION


@dataclass(frozen=True, slots=True)
class ComposedFigures:
    """Requests a second within the objectives, and seconds at that rate."""

    rate: float
    ttft_p90: float
    tpot_p90: float

    def judged(self, devices: int, cost: float) -> JudgedValues:
        """In the order of front.OBJECTIVES."""
        per_million = cost_per_million(devices, self.rate, cost)
        return (-self.rate / devices, per_million, self.ttft_p90, self.tpot_p90, float(devices))


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """By one worker of a kind (count 1): the goodput of its phase alone, and what it attains at other rates."""

    found: Mapping[InstanceGroup, FoundGoodput]

    def rate(self, group: InstanceGroup) -> float:
        """Of all workers of the group; 0 where one misses the objective at every rate."""
        return (self._one(group).rate or 0.0) * group.count

    def compose(self, placement: CandidatePlacement) -> ComposedFigures | None:
        """Of a whole placement; None where some phase meets its objective at no rate."""
        rate = min(self.rate(group) for group in placement.groups) * placement.units
        if not rate:
            return None
        first, last = placement.groups[0], placement.groups[-1]
        return ComposedFigures(
            rate,
            self._p90(first, rate / placement.units / first.count, "ttft_p90"),
            self._p90(last, rate / placement.units / last.count, "tpot_p90"),
        )

    def _one(self, group: InstanceGroup) -> FoundGoodput:
        return self.found[InstanceGroup(group.role, group.shape, 1, group.budget)]

    def _p90(self, group: InstanceGroup, rate: float, which: str) -> float:
        runs = self._one(group).whole_runs()
        return float(np.interp(rate, [run.rate for run in runs], [getattr(run, which) for run in runs]))
