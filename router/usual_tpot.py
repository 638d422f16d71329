"""What TPOT texts usually have that begin as one does now: the middle of what the latest had, not their mean.

Pure. A mean says what many texts cost together. Of one it says too much where most are alone on their worker and few
are joined by many others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

LATEST = 30  # texts that began beside about as many others
NEAR = math.log(2.0)  # predictions farther apart than this say nothing of each other
SLOPE = 0.5  # of ln(observed) by ln(predicted): a part of what predictions differ by is noise of their own
MOST_BESIDE = 16  # powers of two
MOST = 20.0  # of a logarithm of seconds: beyond it is no latency


class UsualTpot:
    """By how many others hold a lease where a text is to decode: none, 1, 2 to 3, 4 to 7, and so on.

    Of each such kind the median of ln(observed) + SLOPE · ln(p / predicted) over those of the latest whose predictions
    are NEAR p, and p itself: where nothing like it was seen p is all there is.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[tuple[float, float]]] = {}  # logarithms of observed and predicted, by kind

    def observe(self, beside: int, predicted: float, observed: float) -> None:
        """A text that began beside so many others; seconds. What is no latency is left out."""
        if 0.0 < predicted < math.inf and 0.0 < observed < math.inf:
            self._add(_kind(beside), math.log(observed), math.log(predicted))

    def _add(self, kind: int, observed: float, predicted: float) -> None:
        if abs(observed) <= MOST and abs(predicted) <= MOST:
            self._latest.setdefault(kind, deque(maxlen=LATEST)).append((observed, predicted))

    def at(self, beside: int, predicted: float) -> float:
        """Seconds that half of the texts that begin beside so many, and are predicted so, do not exceed."""
        latest = self._latest.get(_kind(beside))
        if not latest or not 0.0 < predicted < math.inf:
            return predicted
        at = math.log(predicted)
        near = [observed + SLOPE * (at - told) for observed, told in latest if abs(at - told) <= NEAR]
        return math.exp(median([*near, at])) if near else predicted

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
                if not (abs(observed) <= MOST and abs(predicted) <= MOST):
                    raise ValueError(f"no logarithms of latencies: {observed}, {predicted}")
                made._add(int(kind), float(observed), float(predicted))
        return made


def _kind(beside: int) -> int:
    return min(MOST_BESIDE, max(0, beside).bit_length())
