"""Searches for the highest request rate at which enough requests meet their objectives.

Pure: it says which rate to try next and is told what share was attained there. It sends nothing and knows no clock.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchLimits:
    """Where to start, how fine to go, and when to stop. Rates are requests per second."""

    start: float = 1.0
    attainment: float = 0.9  # the share that must meet the objectives
    tolerance: float = 0.05  # the answer and the lowest failing rate differ by at most this share
    growth: float = 2.0  # factor between rates until the answer is bracketed
    lowest: float = 0.01  # below it the answer is "none"
    highest: float = 1e5
    confirmations: int = 0  # more measurements of the answer, whose median must hold
    probes: int = 40  # at most

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest:
            raise ValueError(f"the first rate must lie between {self.lowest:g} and {self.highest:g} requests/s")
        if not 0 < self.attainment <= 1:
            raise ValueError("--attainment must lie above 0 and at most at 1")
        if self.tolerance <= 0 or self.growth <= 1:
            raise ValueError("--rate-tolerance must be positive, and rates must grow while the answer is looked for")
        if self.confirmations < 0 or self.probes < 1:
            raise ValueError("a search needs at least one probe, and no negative number of confirmations")


@dataclass(slots=True)
class GoodputSearch:
    """Multiplies or divides the first rate by `growth` until the answer is bracketed, then bisects, then confirms.

    Use: while `next_rate()` gives a rate, measure it and `record` the attained share; then read `answer`. Noise is
    met by confirming: every rate is judged by the median of its own measurements, and an answer that does not
    hold becomes the new upper end.
    """

    limits: SearchLimits = field(default_factory=SearchLimits)
    measured: dict[float, list[float]] = field(default_factory=dict)  # attained shares by rate

    def next_rate(self) -> float | None:
        """The rate to measure next, or None when the search has ended."""
        limits = self.limits
        if sum(map(len, self.measured.values())) >= limits.probes:
            return None
        if not self.measured:
            return limits.start
        passing, failing = self.answer, self._lowest_failing()
        if failing is None:
            assert passing is not None
            return (
                min(passing * limits.growth, limits.highest) if passing < limits.highest else self._unconfirmed(passing)
            )
        if passing is None:
            return max(failing / limits.growth, limits.lowest) if failing > limits.lowest else None
        if failing > passing * (1 + limits.tolerance):
            return math.sqrt(passing * failing)  # the middle in the sense that the tolerance has
        return self._unconfirmed(passing)

    def record(self, rate: float, attained: float) -> None:
        """The share of requests at `rate` that met the objectives, between 0 and 1."""
        self.measured.setdefault(rate, []).append(attained)

    @property
    def answer(self) -> float | None:
        """The highest rate that attains so far, None when none does; every rate that failed is above it."""
        return max((rate for rate in self.measured if self.passes(rate)), default=None)

    def passes(self, rate: float) -> bool:
        """True if the median of the shares attained at this measured rate is enough."""
        return statistics.median(self.measured[rate]) >= self.limits.attainment

    def _lowest_failing(self) -> float | None:
        return min((rate for rate in self.measured if not self.passes(rate)), default=None)

    def _unconfirmed(self, rate: float) -> float | None:
        return rate if len(self.measured[rate]) <= self.limits.confirmations else None
