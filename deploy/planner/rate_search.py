"""Which rate to try next for a placement, and what has come of the rates tried: pure, as bench.goodput is.

Rates grow or shrink from a guess until the answer lies between two, and the gap is halved; or the reference's way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bench.goodput import GoodputSearch, SearchLimits
from deploy.planner.attainment import Attainment, AttainmentGoal

LEAST, MOST = 1e-3, 1e5  # requests a second
REFERENCE_MOST, REFERENCE_GAP = 5.0, 0.3125  # requests a second and device, between which and how finely it halves


class RateSearch(Protocol):
    """Gives rates until it knows; bench.goodput.GoodputSearch is one."""

    def next_rate(self) -> float | None:
        """The rate to try now; None when the search is over."""

    def record(self, rate: float, attained: float) -> None:
        """The share attained at a rate."""

    @property
    def answer(self) -> float | None:
        """The highest rate that attains; None while there is none."""


@dataclass(slots=True)
class HalvingSearch:
    """DistServe's own: halves the rates from 0 to 5 a device until they are 5/16 apart: a grid."""

    devices: int
    share: float
    low: float = 0.0
    high: float = REFERENCE_MOST

    def next_rate(self) -> float | None:
        return None if self.high - self.low <= REFERENCE_GAP else (self.low + self.high) / 2 * self.devices

    def record(self, rate: float, attained: float) -> None:
        if attained >= self.share:
            self.low = rate / self.devices
        else:
            self.high = rate / self.devices

    @property
    def answer(self) -> float | None:
        return self.low * self.devices or None


def bracketing(start: float, goal: AttainmentGoal, tolerance: float) -> GoodputSearch:
    """From a guess, by steps that are right where the guess is near: a rate off by a quarter costs one more try."""
    limits = SearchLimits(
        start=min(max(start, LEAST), MOST),
        attainment=goal.share,
        tolerance=tolerance,
        growth=1.3,
        lowest=min(max(start, LEAST), MOST) / 64,
        highest=MOST,
    )
    return GoodputSearch(limits)


@dataclass(slots=True)
class FoundGoodput:
    """The highest rate of something at which the goal was met (None: at none), and every rate that was tried."""

    rate: float | None = None
    tried: dict[float, Attainment] = field(default_factory=dict)

    @property
    def at_best(self) -> Attainment | None:
        """What was attained at the answer."""
        return None if self.rate is None else self.tried[self.rate]

    def whole_runs(self) -> list[Attainment]:
        """Those that were not given up, by rate."""
        return [self.tried[rate] for rate in sorted(self.tried) if not self.tried[rate].given_up]
