"""Whether two kinds of measurements, taken in pairs whose order was drawn, differ: permutation tests. Pure.

Within a pair only the draw decided which was which, so under the null hypothesis swapping a pair changes nothing:
p values are exact, whatever the distribution, and drift from pair to pair counts for neither side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """Of two samples of `pairs` each. `auc`: how often one of the first is above one of the second; 0.5: never told."""

    pairs: int
    mean_p: float  # of the difference of means of logarithms, two-sided
    ks_p: float  # of the Kolmogorov-Smirnov distance
    ks: float
    auc: float
    median_difference: float  # in the unit of the samples

    def differ(self, level: float) -> bool:
        """At this level in all: each of the two tests has half of it (Bonferroni)."""
        return min(self.mean_p, self.ks_p) < level / 2


def compare(first: Numbers, second: Numbers, *, rounds: int, seed: int) -> PairedComparison:
    """Positive numbers, [pairs] each; `rounds` random swaps of pairs. The least p is 1 / (rounds + 1)."""
    pairs = len(first)
    draw = np.random.default_rng(seed)
    differences = np.log(first) - np.log(second)
    order = np.argsort(np.concatenate([first, second]), kind="stable")
    steps, pair, last = _steps(order, pairs), order % pairs, _last_of_equals(first, second, order)
    mean, distance = abs(differences.sum()), _distance(steps, last)
    means = distances = 1
    for _ in range(rounds):
        signs = draw.choice(np.array([-1.0, 1.0]), size=pairs)
        means += bool(abs((signs * differences).sum()) >= mean * (1 - 1e-12))
        distances += bool(_distance(steps * signs[pair], last) >= distance - 1e-9)
    return PairedComparison(
        pairs=pairs,
        mean_p=means / (rounds + 1),
        ks_p=distances / (rounds + 1),
        ks=distance / pairs,
        auc=_auc(first, second),
        median_difference=float(np.median(first) - np.median(second)),
    )


def _steps(order: NDArray[np.intp], pairs: int) -> Numbers:
    """1 where the next larger number is of the first sample, else -1."""
    return np.where(order < pairs, 1.0, -1.0)


def _last_of_equals(first: Numbers, second: Numbers, order: NDArray[np.intp]) -> NDArray[np.bool_]:
    found = np.concatenate([first, second])[order]
    return np.append(found[1:] != found[:-1], True)


def _distance(steps: Numbers, last: NDArray[np.bool_]) -> float:
    """Between the two distribution functions, times the number of pairs."""
    return float(np.abs(np.cumsum(steps))[last].max())


def _auc(first: Numbers, second: Numbers) -> float:
    """Mann and Whitney's U over its most; equal ones count half."""
    ordered = np.sort(second)
    below, upto = np.searchsorted(ordered, first, "left"), np.searchsorted(ordered, first, "right")
    return float((below + upto).sum() / 2 / (len(first) * len(second)))
