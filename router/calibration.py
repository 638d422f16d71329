"""What came of predictions: a factor and an error for each worker, from the latencies that requests then had.

Pure. Factors are geometric means that forget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHT = 0.02  # of the newest observation
OWN = 0.25  # of how far a worker is from all of them: most of that is chance, and its step cost says the rest
MOST = 3.0  # a factor is within 1/MOST and MOST: beyond that something else is wrong
PRIOR_ERROR = 0.3
MOST_WORKERS = 4096
OUTLIER = 1.5  # ln(observed / predicted) beyond this counts as this


@dataclass(slots=True)
class Drift:
    """ln(observed / predicted) of one latency at one worker: its mean and variance, old ones fading."""

    mean: float = 0.0
    variance: float = PRIOR_ERROR**2
    count: int = 0

    def observe(self, predicted: float, observed: float) -> None:
        """Seconds, as predicted before any correction."""
        if not (0.0 < predicted < math.inf and 0.0 < observed < math.inf):
            return
        ratio = min(OUTLIER, max(-OUTLIER, math.log(observed / predicted)))
        self.count += 1
        weight = max(WEIGHT, 1.0 / (1 + self.count))  # the first ones count as in a plain mean
        self.variance += weight * ((ratio - self.mean) ** 2 - self.variance)
        self.mean += weight * (ratio - self.mean)

    @property
    def error(self) -> float:
        """Standard deviation of ln(observed / predicted) once the factor is applied."""
        return math.sqrt(self.variance)

    @property
    def factor(self) -> float:
        """What a prediction is multiplied by."""
        return min(MOST, max(1.0 / MOST, math.exp(self.mean)))


class Calibration:
    """Drifts of TTFT by the worker that prefills and of TPOT by the one that decodes, and of all together."""

    def __init__(self) -> None:
        self._first = _Drifts()
        self._further = _Drifts()

    def first(self, prefill: str) -> Drift:
        """Of TTFT, at a worker by its instance."""
        return self._first.of(prefill)

    def further(self, decode: str) -> Drift:
        """Of TPOT, at a worker by its instance."""
        return self._further.of(decode)

    def first_token(self, prefill: str, predicted: float, observed: float) -> None:
        """TTFT: predicted without correction, and observed; seconds."""
        self._first.observe(prefill, predicted, observed)

    def further_tokens(self, decode: str, predicted: float, observed: float) -> None:
        """TPOT: predicted without correction, and observed; seconds."""
        self._further.observe(decode, predicted, observed)


class _Drifts:
    """Of one latency."""

    def __init__(self) -> None:
        self._all = Drift()
        self._own: dict[str, Drift] = {}

    def observe(self, instance: str, predicted: float, observed: float) -> None:
        self._all.observe(predicted, observed)
        self._own.setdefault(instance, Drift()).observe(predicted, observed)
        if len(self._own) > MOST_WORKERS:
            del self._own[next(iter(self._own))]  # that of a worker long gone, or soon known again

    def of(self, instance: str) -> Drift:
        """Of all, and a part of what is the worker's own."""
        own = self._own.get(instance)
        if own is None:
            return self._all
        return Drift(self._all.mean + OWN * (own.mean - self._all.mean), own.variance, own.count)
