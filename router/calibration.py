"""What came of predictions: a factor and an error for each worker, from the latencies that requests then had.

Pure. Factors are geometric means that forget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHT = 0.05  # of the newest observation
MOST = 3.0  # a factor is within 1/MOST and MOST: beyond that something else is wrong
PRIOR_ERROR = 0.3
MOST_WORKERS = 4096  # lives of workers
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
    """Drifts by worker instance: of TTFT where it prefills, of TPOT where it decodes."""

    def __init__(self) -> None:
        self._first: dict[str, Drift] = {}
        self._further: dict[str, Drift] = {}
        self._new = Drift()

    def first(self, prefill: str) -> Drift:
        """Of TTFT."""
        return self._first.get(prefill, self._new)

    def further(self, decode: str) -> Drift:
        """Of TPOT."""
        return self._further.get(decode, self._new)

    def first_token(self, prefill: str, predicted: float, observed: float) -> None:
        """TTFT: predicted without correction, and observed; seconds."""
        _known(self._first, prefill).observe(predicted, observed)

    def further_tokens(self, decode: str, predicted: float, observed: float) -> None:
        """TPOT: predicted without correction, and observed; seconds."""
        _known(self._further, decode).observe(predicted, observed)

    def retain(self, instances: set[str]) -> None:
        """All other workers are gone."""
        for drifts in (self._first, self._further):
            for gone in [known for known in drifts if known not in instances]:
                del drifts[gone]


def _known(drifts: dict[str, Drift], instance: str) -> Drift:
    """The worker's drift; where there are very many, the one known longest is forgotten: workers come and go."""
    if instance not in drifts and len(drifts) >= MOST_WORKERS:
        del drifts[next(iter(drifts))]
    return drifts.setdefault(instance, Drift())
