"""What came of predictions: a factor and an error for each worker, from the latencies that requests then had.

Pure. Factors are geometric means that forget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.chances import sure_ratio
from router.usual_tpot import UsualTpot
from serving.messages import Slo

WEIGHT = 0.02  # of the newest observation
ALIKE = 16  # observations in a row that tell no more than one: their requests met the same queue and the same batch
TEXTS_ALIKE = 2  # the same of texts, which share little
MOST_TOKENS = 16.0  # a step
TEXT_KINDS = 3  # of a text (router.text_kinds)
CERTAIN = 2.0  # times as far apart as chance alone would have them is where workers begin to count as different
MOST = 3.0  # a factor is within 1/MOST and MOST: beyond that something else is wrong
PRIOR_ERROR = 0.3
MOST_WORKERS = 1024
URGENCIES = 20
_BOTH = (False, True)  # whether a worker computes prompts and decodes: what drifts are kept apart by
OUTLIER = 1.5  # ln(observed / predicted) beyond this counts as this


@dataclass(slots=True)
class Drift:
    """ln(observed / predicted) of one latency at one worker: its mean and variance, old ones fading."""

    mean: float = 0.0
    variance: float = PRIOR_ERROR**2
    count: int = 0
    alike: int = ALIKE
    factor: float = field(init=False, repr=False, compare=False)  # what a prediction is multiplied by
    error: float = field(init=False, repr=False, compare=False)  # standard deviation of ln(observed / predicted) then
    sure: float = field(init=False, repr=False, compare=False)  # the sure_ratio of that

    def __post_init__(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """What choices ask for, which are more than observations."""
        self.factor = min(MOST, max(1.0 / MOST, math.exp(self.mean)))
        self.error = math.sqrt(self.variance)
        self.sure = sure_ratio(self.error)

    def observe(self, predicted: float, observed: float) -> None:
        """Seconds, as predicted before any correction."""
        if not (0.0 < predicted < math.inf and 0.0 < observed < math.inf):
            return
        ratio = min(OUTLIER, max(-OUTLIER, math.log(observed / predicted)))
        self.count += 1
        weight = max(WEIGHT, 1.0 / (1 + self.count))  # the first ones count as in a plain mean
        self.variance += weight * ((ratio - self.mean) ** 2 - self.variance)
        self.mean += weight * (ratio - self.mean)
        self._settle()

    @property
    def chance(self) -> float:
        """The variance that its mean has by chance."""
        return self.variance * self.alike / max(1.0, min(self.count, 2.0 / WEIGHT - 1.0))


class Calibration:
    """Drifts of TTFT by the worker that prefills and of TPOT by the one that decodes, and of all together.

    Beside them the tokens that a sequence gets in a step, more than one where drafts are accepted: by the worker, and
    by what kinds its text is of, each as far as the coarser ones leave to it (router.text_kinds).

    Those of TTFT are kept apart by urgency: who is due soon passes others in a worker's queue, which predictions of a
    queue that is served in turn do not know. Both are kept apart for workers that do `both`, prompts and decodes: what
    the two cost each other is off in another way than what either takes alone.

    Corrected predictions are means, which placements are compared by; a request is told what is usual.
    """

    def __init__(self) -> None:
        self._first = [[_Drifts() for _ in range(URGENCIES)] for _ in _BOTH]
        self._further = [_Drifts() for _ in _BOTH]
        self._usual = [UsualTpot() for _ in _BOTH]
        self._steps = _Drifts()
        self._texts = [_Drifts(TEXTS_ALIKE) for _ in range(TEXT_KINDS)]

    def first(self, prefill: str, urgency: int = 0, *, both: bool = False) -> Drift:
        """Of TTFT, at a worker by its instance, for requests of this urgency."""
        return self._first[both][urgency].of(prefill)

    def further(self, decode: str, *, both: bool = False) -> Drift:
        """Of TPOT, at a worker by its instance."""
        return self._further[both].of(decode)

    def usual_tpot(self, beside: int, predicted: float, *, both: bool = False) -> float:
        """What texts usually take, a token, that begin beside so many and are predicted so; seconds."""
        return self._usual[both].at(beside, predicted)

    def tokens_a_step(self, decode: str, apart: float = 0.0) -> float:
        """Of a sequence that decodes at this worker, in the (geometric) mean, its text `apart` from all."""
        mean = self._steps.of(decode).mean + apart
        return min(MOST_TOKENS, math.exp(mean)) if mean > 0.0 else 1.0

    def apart(self, texts: Sequence[str]) -> float:
        """The logarithm of how many times as many tokens a step texts of these kinds get as all, as far as is known."""
        return sum(map(_Drifts.apart, self._texts, texts))

    def first_token(
        self, prefill: str, predicted: float, observed: float, urgency: int = 0, *, both: bool = False
    ) -> None:
        """TTFT: predicted without correction, and observed; seconds."""
        self._first[both][urgency].observe(prefill, predicted, observed)

    def further_tokens(self, decode: str, predicted: float, observed: float, *, both: bool = False) -> None:
        """TPOT: predicted without correction, and observed; seconds."""
        self._further[both].observe(decode, predicted, observed)

    def text_took(self, beside: int, predicted: float, observed: float, *, both: bool = False) -> None:
        """TPOT of a text that began beside so many: predicted with corrections, and observed; seconds."""
        self._usual[both].observe(beside, predicted, observed)

    def steps_took(self, decode: str, tokens: float, texts: Sequence[str] = ()) -> None:
        """A sequence of these kinds of texts has had so many tokens for each step it was part of."""
        expected = math.exp(self._steps.of(decode).mean)
        self._steps.observe(decode, 1.0, tokens)
        for drifts, name in zip(self._texts, texts, strict=False):
            further = drifts.apart(name)
            if name:
                drifts.observe(name, expected, tokens)
            expected *= math.exp(further)

    def kept(self) -> dict[str, Any]:
        """All of it as plain data, for `from_kept`."""
        first = [[drifts.kept() for drifts in urgencies] for urgencies in self._first]
        further, usual, texts = ([each.kept() for each in some] for some in (self._further, self._usual, self._texts))
        return {"first": first, "further": further, "usual": usual, "steps": self._steps.kept(), "texts": texts}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> Calibration:
        """As it was kept. Raises ValueError, TypeError, KeyError or AttributeError for what cannot be that."""
        made = cls()
        made._first = [[_Drifts.from_kept(drifts) for drifts in urgencies] for urgencies in kept["first"]]
        made._further = [_Drifts.from_kept(drifts) for drifts in kept["further"]]
        made._usual = [UsualTpot.from_kept(each) for each in kept["usual"]]
        made._steps = _Drifts.from_kept(kept["steps"])
        made._texts = [_Drifts.from_kept(drifts, TEXTS_ALIKE) for drifts in kept["texts"]]
        lengths = [len(made._first), *map(len, made._first), len(made._further), len(made._usual), len(made._texts)]
        if lengths != [len(_BOTH), *[URGENCIES] * len(_BOTH), len(_BOTH), len(_BOTH), TEXT_KINDS]:
            raise ValueError(f"{lengths} drifts of TTFT and TPOT, usual TPOTs, and kinds of texts")
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

    def __init__(self, alike: int = ALIKE) -> None:
        self.alike = alike
        self._all = Drift(alike=alike)
        self._own: dict[str, Drift] = {}
        # Over `_own`: the means, their squares, and the variances that they have by chance.
        self._sum = self._squares = self._chance = 0.0
        # What choices have asked for since the last observation: they ask for more than there are observations.
        self._known: dict[str, Drift] = {}
        self._differ: float | None = None

    def observe(self, instance: str, predicted: float, observed: float) -> None:
        self._known, self._differ = {}, None
        self._all.observe(predicted, observed)
        own = self._own.get(instance)
        if own is None:
            own = self._own[instance] = Drift(alike=self.alike)
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
        found = self._known.get(instance)
        if found is None:
            own = self._own.get(instance)
            found = self._known[instance] = self._all if own is None or len(self._own) < 2 else self._drawn(own)
        return found

    def _drawn(self, own: Drift) -> Drift:
        """A worker's own, drawn to that of all."""
        if self._differ is None:
            count = len(self._own)
            apart = max(0.0, self._squares - self._sum * self._sum / count) / (count - 1)
            self._differ = max(0.0, apart - CERTAIN * self._chance / count)
        differ, every = self._differ, self._all
        if not differ:
            return every
        share = differ / (differ + own.chance)
        mean = every.mean + share * (own.mean - every.mean)
        variance = every.variance + share * (own.variance - every.variance)
        return Drift(mean, variance, own.count, self.alike)

    def apart(self, name: str) -> float:
        """By how much the mean of this one differs from that of all, as far as is no chance."""
        return self.of(name).mean - self._all.mean

    def kept(self) -> dict[str, Any]:
        own = {instance: _numbers(drift) for instance, drift in self._own.items()}
        return {"all": _numbers(self._all), "own": own}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any], alike: int = ALIKE) -> _Drifts:
        made = cls(alike)
        made._all = _drift(kept["all"], alike)
        made._own = {str(instance): _drift(numbers, alike) for instance, numbers in kept["own"].items()}
        for own in made._own.values():
            made._count(own, 1)
        return made


def _numbers(drift: Drift) -> list[float]:
    return [drift.mean, drift.variance, drift.count]


def _drift(numbers: Sequence[float], alike: int) -> Drift:
    mean, variance, count = numbers
    if not (-OUTLIER <= mean <= OUTLIER and 0.0 <= variance < math.inf and count >= 0):
        raise ValueError(f"no drift: {numbers}")
    return Drift(mean, variance, int(count), alike)
