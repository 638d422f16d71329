"""What came of predictions: a factor and an error for each worker, from the latencies that requests then had.

Pure. Factors are geometric means that forget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.messages import Slo

WEIGHT = 0.02  # of the newest observation
ALIKE = 16  # observations in a row that tell no more than one: their requests met the same queue and the same batch
CERTAIN = 2.0  # times as far apart as chance alone would have them is where workers begin to count as different
MOST = 3.0  # a factor is within 1/MOST and MOST: beyond that something else is wrong
PRIOR_ERROR = 0.3
MOST_WORKERS = 1024
URGENCIES = 20
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
    def chance(self) -> float:
        """The variance that its mean has by chance."""
        return self.variance * ALIKE / max(1.0, min(self.count, 2.0 / WEIGHT - 1.0))

    @property
    def factor(self) -> float:
        """What a prediction is multiplied by."""
        return min(MOST, max(1.0 / MOST, math.exp(self.mean)))


class Calibration:
    """Drifts of TTFT by the worker that prefills and of TPOT by the one that decodes, and of all together.

    Beside them the tokens that a sequence gets in a step, more than one where drafts are accepted.

    Those of TTFT are kept apart by urgency: who is due soon passes others in a worker's queue, which predictions of a
    queue that is served in turn do not know.
    """

    def __init__(self) -> None:
        self._first = [_Drifts() for _ in range(URGENCIES)]
        self._further = _Drifts()
        self._steps = _Drifts()

    def first(self, prefill: str, urgency: int = 0) -> Drift:
        """Of TTFT, at a worker by its instance, for requests of this urgency."""
        return self._first[urgency].of(prefill)

    def further(self, decode: str) -> Drift:
        """Of TPOT, at a worker by its instance."""
        return self._further.of(decode)

    def tokens_a_step(self, decode: str) -> float:
        """Of a sequence that decodes at this worker, in the (geometric) mean."""
        return self._steps.of(decode).factor

    def first_token(self, prefill: str, predicted: float, observed: float, urgency: int = 0) -> None:
        """TTFT: predicted without correction, and observed; seconds."""
        self._first[urgency].observe(prefill, predicted, observed)

    def further_tokens(self, decode: str, predicted: float, observed: float) -> None:
        """TPOT: predicted without correction, and observed; seconds."""
        self._further.observe(decode, predicted, observed)

    def steps_took(self, decode: str, tokens: float) -> None:
        """A sequence has had so many tokens for each step it was part of."""
        self._steps.observe(decode, 1.0, tokens)

    def kept(self) -> dict[str, Any]:
        """All of it as plain data, for `from_kept`."""
        first = [drifts.kept() for drifts in self._first]
        return {"first": first, "further": self._further.kept(), "steps": self._steps.kept()}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> Calibration:
        """As it was kept. Raises ValueError, TypeError, KeyError or AttributeError for what cannot be that."""
        made = cls()
        made._first = [_Drifts.from_kept(drifts) for drifts in kept["first"]]
        made._further, made._steps = _Drifts.from_kept(kept["further"]), _Drifts.from_kept(kept["steps"])
        if len(made._first) != URGENCIES:
            raise ValueError(f"{len(made._first)} urgencies, not {URGENCIES}")
        return made


def urgency_of(slo: Slo) -> int:
    """Requests whose TTFT objectives are within about a factor of 2 are equally urgent; 0: those without one."""
    if slo.ttft_ms is None or not 0.0 < slo.ttft_ms < math.inf:
        return 0
    return max(1, min(URGENCIES - 1, round(math.log2(slo.ttft_ms))))


class _Drifts:
    """Of one latency. A worker's own is believed as far as workers differ by more than chance (empirical Bayes).

    Efron and Morris, "Stein's Estimation Rule and Its Competitors" (1973): a mean is drawn to that of all by the share
    that chance has in how far the means lie apart. Equal workers so keep one factor, which does not prefer whoever was
    lucky lately; one that is slow in a way that its step cost does not say gets its own.
    """

    def __init__(self) -> None:
        self._all = Drift()
        self._own: dict[str, Drift] = {}
        # Over `_own`: the means, their squares, and the variances that they have by chance.
        self._sum = self._squares = self._chance = 0.0

    def observe(self, instance: str, predicted: float, observed: float) -> None:
        self._all.observe(predicted, observed)
        own = self._own.get(instance)
        if own is None:
            own = self._own[instance] = Drift()
        else:
            self._count(own, -1)
        own.observe(predicted, observed)
        self._count(own, 1)
        if len(self._own) > MOST_WORKERS:  # that of a worker long gone, or soon known again
            self._count(self._own.pop(next(iter(self._own))), -1)

    def _count(self, own: Drift, sign: int) -> None:
        self._sum += sign * own.mean
        self._squares += sign * own.mean * own.mean
        self._chance += sign * own.chance

    def of(self, instance: str) -> Drift:
        """Of all, and of the worker's own as much as is not chance."""
        own, count = self._own.get(instance), len(self._own)
        if own is None or count < 2:
            return self._all
        apart = max(0.0, self._squares - self._sum * self._sum / count) / (count - 1)
        differ = max(0.0, apart - CERTAIN * self._chance / count)
        share = differ / (differ + own.chance) if differ else 0.0
        every = self._all
        mean, variance = (
            whole + share * (part - whole) for whole, part in ((every.mean, own.mean), (every.variance, own.variance))
        )
        return Drift(mean, variance, own.count)

    def kept(self) -> dict[str, Any]:
        own = {instance: _numbers(drift) for instance, drift in self._own.items()}
        return {"all": _numbers(self._all), "own": own}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> _Drifts:
        made = cls()
        made._all = _drift(kept["all"])
        made._own = {str(instance): _drift(numbers) for instance, numbers in kept["own"].items()}
        for own in made._own.values():
            made._count(own, 1)
        return made


def _numbers(drift: Drift) -> list[float]:
    return [drift.mean, drift.variance, drift.count]


def _drift(numbers: Sequence[float]) -> Drift:
    mean, variance, count = numbers
    if not (-OUTLIER <= mean <= OUTLIER and 0.0 <= variance < math.inf and count >= 0):
        raise ValueError(f"no drift: {numbers}")
    return Drift(mean, variance, int(count))
