"""Finds the rate at which a wanted share of requests is attained, a measurement at a time, while there is time.

Pure: it says which rate to measure next and is told what was attained there. Unlike bench.goodput's search it can stop
at any time with what it knows, and uses by how much a share was missed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

LEAST_STEP, MOST_STEP = 0.03, 0.25  # by which a rate is changed until the wanted share lies between two
INSIDE = 0.25  # of the way between two rates, that a rate measured between them is away from either


@dataclass(slots=True)
class Crossing:
    """`first` is a guess, in requests a second; rates are told apart down to `tolerance`."""

    first: float
    wanted: float = 0.9  # below 1
    tolerance: float = 0.03
    attained: dict[float, float] = field(default_factory=dict)  # share by rate

    @property
    def passing(self) -> float | None:
        """The highest rate that attains."""
        return max((rate for rate, share in self.attained.items() if share >= self.wanted), default=None)

    @property
    def failing(self) -> float | None:
        """The lowest rate above that, which does not."""
        least = self.passing or 0.0
        return min(
            (rate for rate, share in self.attained.items() if share < self.wanted and rate > least), default=None
        )

    @property
    def width(self) -> float:
        """By how much the two differ: infinite while one of them is not known."""
        if self.passing is None or self.failing is None:
            return inf
        return self.failing / self.passing - 1.0

    @property
    def over(self) -> bool:
        return self.width <= self.tolerance

    @property
    def goodput(self) -> float | None:
        """Where a straight line between the two attains the wanted share; None while one of them is not known."""
        low, high = self.passing, self.failing
        if low is None or high is None:
            return None
        above, below = self.attained[low] - self.wanted, self.wanted - self.attained[high]
        return low + (high - low) * above / (above + below)

    def next_rate(self) -> float:
        """The rate to measure next."""
        low, high, found = self.passing, self.failing, self.goodput
        if low is not None and high is not None and found is not None:
            margin = INSIDE * (high - low)
            return min(high - margin, max(low + margin, found))
        if low is not None:
            return low * (1.0 + self._step(low))
        if high is not None:
            return high / (1.0 + self._step(high))
        return self.first

    def _step(self, rate: float) -> float:
        """Larger the farther the share is from the wanted one, and the more measurements there have been.

        Of all requests in time there may be any number more; of few, the rate is too high by about what is missed.
        """
        share = self.attained[rate]
        away = (share - self.wanted) / (1.0 - self.wanted) if share >= self.wanted else 1.0 - share / self.wanted
        return min(MOST_STEP, max(LEAST_STEP, away * MOST_STEP * len(self.attained)))
