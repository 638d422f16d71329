"""What came of predictions: a factor and an error for each worker, from the latencies that requests then had.

Pure. Factors are geometric means that forget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def kept(self) -> dict[str, Any]:
        """All of it as plain data, for `from_kept`."""
        return {"first": self._first.kept(), "further": self._further.kept()}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> Calibration:
        """As it was kept. Raises ValueError, TypeError, KeyError or AttributeError for what cannot be that."""
        made = cls()
        made._first, made._further = _Drifts.from_kept(kept["first"]), _Drifts.from_kept(kept["further"])
        return made


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

    def kept(self) -> dict[str, Any]:
        own = {instance: _numbers(drift) for instance, drift in self._own.items()}
        return {"all": _numbers(self._all), "own": own}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> _Drifts:
        made = cls()
        made._all = _drift(kept["all"])
        made._own = {str(instance): _drift(numbers) for instance, numbers in kept["own"].items()}
        return made


def _numbers(drift: Drift) -> list[float]:
    return [drift.mean, drift.variance, drift.count]


def _drift(numbers: Sequence[float]) -> Drift:
    mean, variance, count = numbers
    if not (-OUTLIER <= mean <= OUTLIER and 0.0 <= variance < math.inf and count >= 0):
        raise ValueError(f"no drift: {numbers}")
    return Drift(mean, variance, int(count))
