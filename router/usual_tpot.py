"""What TPOT texts usually have that begin as one does now: where most of the latest lie, not their mean or median.

Pure. A mean says what many texts cost together. Where more than half are alone on their worker and take about the same,
and the others take far longer, the mean is what few take, and the median lies at the upper end of the many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

LATEST = 30  # texts that began beside about as many others
HALVED = 12  # of those that count: one after which so many have ended counts half
NEAR = math.log(2.0)  # predictions farther apart than this say nothing of each other
NOISE = 0.2  # of ln(predicted): by what predictions differ more texts differ too
MOST = 0.6  # of what counts: the narrowest range that holds so much is where texts usually lie
MOST_BESIDE = 16  # powers of two
LARGEST = 20.0  # of a logarithm of seconds: beyond it is no latency

_BY_AGE = tuple(0.5 ** (age / HALVED) for age in range(LATEST))


class UsualTpot:
    """By how many others hold a lease where a text is to decode: none, 1, 2 to 3, 4 to 7, and so on.

    What is told of a text is the middle of the narrowest range that holds MOST of what counts, a weighted least
    quantile of squares (Rousseeuw, 1984). What counts are the latest texts of its kind whose predictions are NEAR its
    own, p, each by how many of these have ended since, and p itself by 1. Their values are ln(observed), moved by what
    ln(p) and ln(predicted) differ by beyond NOISE. Where nothing like it was seen p is told.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[tuple[float, float]]] = {}  # logarithms of observed and predicted, by kind

    def observe(self, beside: int, predicted: float, observed: float) -> None:
        """A text that began beside so many others; seconds. What is no latency is left out."""
        if 0.0 < predicted < math.inf and 0.0 < observed < math.inf:
            self._add(_kind(beside), math.log(observed), math.log(predicted))

    def _add(self, kind: int, observed: float, predicted: float) -> None:
        if abs(observed) <= LARGEST and abs(predicted) <= LARGEST:
            self._latest.setdefault(kind, deque(maxlen=LATEST)).append((observed, predicted))

    def at(self, beside: int, predicted: float) -> float:
        """Seconds that texts usually take, a token, that begin beside so many and are predicted so."""
        latest = self._latest.get(_kind(beside))
        if not latest or not 0.0 < predicted < math.inf:
            return predicted
        at = math.log(predicted)
        near = [
            observed + _beyond_noise(at - told) for observed, told in reversed(latest) if -NEAR <= at - told <= NEAR
        ]
        return math.exp(densest([*zip(near, _BY_AGE, strict=False), (at, 1.0)])) if near else predicted

    def kept(self) -> dict[str, list[tuple[float, float]]]:
        """Its observations as plain data, for `from_kept`."""
        return {str(kind): list(latest) for kind, latest in self._latest.items()}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any]) -> UsualTpot:
        """As it was kept. Raises ValueError, TypeError or AttributeError for what cannot be that."""
        made = cls()
        for kind, latest in kept.items():
            if not 0 <= int(kind) <= MOST_BESIDE:
                raise ValueError(f"no kind of texts: {kind}")
            for observed, predicted in latest:
                if not (abs(observed) <= LARGEST and abs(predicted) <= LARGEST):
                    raise ValueError(f"no logarithms of latencies: {observed}, {predicted}")
                made._add(int(kind), float(observed), float(predicted))
        return made


def densest(counted: Sequence[tuple[float, float]], share: float = MOST) -> float:
    """The middle of the narrowest range with `share` of all weight; of several the lowest.

    `counted` are values and their weights, positive, at least one; `share` is above 0 and at most 1.
    """
    ordered = sorted(counted)
    weights = [0.0, *accumulate([weight for _, weight in ordered])]
    wanted = share * weights[-1] * (1 - 1e-9)  # a sum of parts may be less than the part of a sum
    last, narrowest, found = 0, math.inf, ordered[0][0]
    for first, (low, _) in enumerate(ordered):
        while weights[last] - weights[first] < wanted:
            if last == len(ordered):
                return found
            last += 1
        high = ordered[last - 1][0]
        if high - low < narrowest:
            narrowest, found = high - low, (low + high) / 2
    return found


def _beyond_noise(difference: float) -> float:
    if difference > NOISE:
        return difference - NOISE
    return difference + NOISE if difference < -NOISE else 0.0


def _kind(beside: int) -> int:
    return min(MOST_BESIDE, max(0, beside).bit_length())
