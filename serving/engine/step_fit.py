"""Fits the form of serving.step_cost to the steps of a worker's engine, while it serves.

Pure: it is told loads and cadences, and when it may refit; no torch, no clock, no I/O. One thread observes, another may
refit: buckets are copied in one go.

The estimate is a least-squares fit of relative errors with Huber's weights (Huber, "Robust Estimation of a Location
Parameter", 1964), no coefficient negative, drawn to a prior where the steps seen do not tell coefficients apart.
Of each bucket of new tokens × context the newest steps are kept, so that rare regimes are not forgotten. What is kept
may be of another hour, when the machine was faster or slower: so the fit is multiplied by its present pace, a running
mean of what the last steps took over what the fit says of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from serving.step_cost import MOST, StepCost, StepLoad

Array = NDArray[np.float64]
SAMPLE = Struct("6d")  # 1, then what a coefficient each is multiplied with; seconds

COEFFICIENTS = ("fixed", "token", "pair", "sequence", "context")
KEPT = 16  # newest steps of each bucket
HALF_RANK = 5.0  # steps of a bucket after which an older one weighs half
HALF_AGE = 4000.0  # steps without one of a bucket after which it weighs half,
OLD = 0.1  # down to this share
REFIT_SECONDS = 1.0
ROUNDS = 5  # of reweighting
TUNING = 1.5  # standard deviations from which on Huber's weights fall
LEAST_SPREAD = 0.02  # of ln(observed / predicted): a clock and a scheduler are no better
GUESSED, LEARNED = 0.7, 0.25  # relative standard deviation of a prior's coefficients: from a model's size, from a fit
FLOOR = 0.7  # of the cheapest cadence seen, below which nothing is predicted
PACE = 0.12  # weight of the newest step in the machine's present pace,
OUTLOOK = 0.04  # and in the one that whoever predicts seconds ahead is told
JUMP = 0.3  # of ln(observed / predicted), what one step moves that at most
RECENT = 32  # newest steps of each kind, by which a new fit takes the pace over
SHORTEST, LONGEST = 1e-7, 1e3  # seconds that a step may have taken
MOST_EACH = MOST / 2  # seconds, of any coefficient
JUDGED = 256  # newest residuals that `error` is made of, of each kind
SPARE = 64  # older ones that may lie about


class StepPace:
    """How much longer than fitted the steps of one kind take just now: a running mean of ln(observed / fitted)."""

    __slots__ = ("count", "mean", "trust")

    def __init__(self) -> None:
        self.mean = 0.0
        self.trust = 0.0  # 1 while steps of this kind come, falling while others do
        self.count = 0  # of them that have come, up to RECENT


class MachinePace:
    """The pace of both kinds of steps in one, each counting as far as it has come lately: `value` is its logarithm.

    `weight` is that of the newest step.
    """

    __slots__ = ("kinds", "value", "weight")

    def __init__(self, weight: float):
        self.weight = weight
        self.kinds = (StepPace(), StepPace())  # of steps without prompts, and with
        self.value = 0.0

    def follow(self, ratio: float, prompts: bool) -> None:
        """Move towards a step's `ratio`, ln(observed / fitted): at first it is their plain mean."""
        kind, other = self.kinds[prompts], self.kinds[not prompts]
        if kind.trust == 0.0:
            kind.mean = ratio if other.trust == 0.0 else self.value
        count = kind.count = min(RECENT, kind.count + 1)
        if count * self.weight < 1.0:
            kind.mean += (ratio - kind.mean) / count
        else:
            kind.mean += self.weight * max(-JUMP, min(JUMP, ratio - kind.mean))
        kind.trust += self.weight * (1.0 - kind.trust)
        other.trust *= 1.0 - self.weight
        self.value = self._blended()

    def take_over(self, changes: Sequence[tuple[float, float] | None]) -> None:
        """There is another fit from now on: how the last steps of each kind have changed against it (refitted)."""
        for kind, change in zip(self.kinds, changes, strict=True):
            if change is not None:
                further, typical = change
                kind.mean += further
                kind.mean = kind.mean if abs(kind.mean - typical) < JUMP else typical
        self.value = self._blended()

    def _blended(self) -> float:
        decode, prompts = self.kinds
        return (decode.trust * decode.mean + prompts.trust * prompts.mean) / (decode.trust + prompts.trust)


class RecentSteps:
    """The newest steps of one kind, as packed samples, and residuals: ln(observed / predicted), with the pace then.

    Packed they take a fifth of what tuples and numbers do, and a simulated cluster has a thousand of these.
    """

    __slots__ = ("_residuals", "steps")

    def __init__(self) -> None:
        self.steps = b""  # RECENT at most
        self._residuals = array("d")

    def add(self, sample: bytes, residual: float) -> None:
        self.steps = self.steps[-(RECENT - 1) * SAMPLE.size :] + sample
        self._residuals.append(residual)
        if len(self._residuals) >= JUDGED + SPARE:
            del self._residuals[:-JUDGED]

    @property
    def residuals(self) -> Array:
        """A copy [N] of the newest JUDGED, the oldest first."""
        return np.array(self._residuals[-JUDGED:])


class StepFit:
    """`cost` is the latest estimate, `outlook` that of the next seconds: read them from any thread.

    `guess` is the prior from the model's size, all coefficients positive; `learned` what an earlier life of the worker
    has fitted, which then is the prior.
    """

    def __init__(self, guess: StepCost, learned: StepCost | None = None):
        self._unit = np.maximum(vector(guess), 1e-15)
        if learned is not None:  # no fit comes to an error of nothing, but a file may say so
            learned = replace(learned, error=max(learned.error, LEAST_SPREAD))
        self._fitted = learned or guess  # before it is multiplied by the pace
        self._prior = vector(self._fitted)
        self._looseness = GUESSED if learned is None else LEARNED
        self._buckets: dict[int, bytes] = {}  # packed samples, the newest last
        self._seen_at: dict[int, int] = {}
        self._present, self._lasting = MachinePace(PACE), MachinePace(OUTLOOK)
        self._recent = RecentSteps(), RecentSteps()  # without prompts, and with
        self._cheapest: tuple[StepLoad, float] | None = None
        self._fitted_to = 0  # steps
        self._refitted_at: float | None = None
        self.seen = 0

    @property
    def cost(self) -> StepCost:
        """The fit at the machine's present pace."""
        return self._at(self._present)

    @property
    def outlook(self) -> StepCost:
        """The fit at the pace of the last seconds, for predictions as far ahead: single steps hardly move it."""
        return self._at(self._lasting)

    def _at(self, machine: MachinePace) -> StepCost:
        """The fit at this pace, lifted where the cheapest step seen would cost next to nothing."""
        fitted, pace = self._fitted, math.exp(machine.value)
        shortfall = 0.0
        if self._cheapest is not None:
            load, seconds = self._cheapest
            shortfall = max(0.0, FLOOR * seconds - pace * fitted.seconds(load))
        return StepCost(
            fixed=min(max(SHORTEST, pace * fitted.fixed + shortfall), MOST_EACH),
            token=min(pace * fitted.token, MOST_EACH),
            pair=min(pace * fitted.pair, MOST_EACH),
            sequence=min(pace * fitted.sequence, MOST_EACH),
            context=min(pace * fitted.context, MOST_EACH),
            error=fitted.error,
            samples=fitted.samples,
        )

    def observe(self, load: StepLoad, seconds: float, *, prompts: bool) -> None:
        """A step's load and cadence; `prompts`: it computed tokens of prompts.

        A cadence that no step has says nothing: the process was stopped meanwhile, or its clock is broken.
        """
        if not SHORTEST <= seconds <= LONGEST or not load.new_tokens:
            return
        new, context = load.new_tokens, load.context_tokens
        sample = SAMPLE.pack(1.0, new, load.pairs, load.sequences, context, seconds)
        key = new.bit_length() << 8 | int(context).bit_length() << 1 | prompts
        self._buckets[key] = self._buckets.get(key, b"")[-(KEPT - 1) * SAMPLE.size :] + sample
        ratio = math.log(seconds / max(1e-12, self._fitted.seconds(load)))
        self._recent[prompts].add(sample, ratio - self._present.value)
        self._present.follow(ratio, prompts)
        self._lasting.follow(ratio, prompts)
        self._seen_at[key] = self.seen
        self.seen += 1  # last: who fits sees no step half observed

    def refit(self, now: float) -> None:
        """Fit anew to what is kept, at most once a second; without news nothing changes."""
        if self.seen == self._fitted_to or (self._refitted_at is not None and now - self._refitted_at < REFIT_SECONDS):
            return
        self._refitted_at, self._fitted_to = now, self.seen
        rows, weights = self._kept()
        fitted = fit(rows[:, :5], rows[:, 5], weights, self._prior, self._unit, self._looseness)
        before = vector(self._fitted)
        changes = [refitted(kind.steps, before, fitted) for kind in self._recent]
        for pace in (self._present, self._lasting):
            pace.take_over(changes)
        self._fitted = stated(fitted, error=self._error(), samples=len(rows))
        _, new, seen, sequences, context, seconds = rows[rows[:, 5].argsort()[len(rows) // 50]].tolist()
        self._cheapest = StepLoad(int(new), seen, int(sequences), context), seconds

    def _kept(self) -> tuple[Array, Array]:
        """The samples [N, 6] and their weights [N]: newer ones weigh more, and so do buckets seen lately."""
        buckets = list(self._buckets.items())
        counts = [len(bucket) // SAMPLE.size for _, bucket in buckets]
        ages = [self.seen - self._seen_at.get(key, self.seen) for key, _ in buckets]
        fresh = [max(OLD, 0.5 ** (age / HALF_AGE)) for age in ages]
        ranks = np.concatenate([_RANKS[KEPT - count :] for count in counts])
        return unpacked(b"".join(bucket for _, bucket in buckets)), np.repeat(fresh, counts) * ranks

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """The standard deviation of ln(observed / predicted) of steps without prompts and with; None: none seen."""
        decode, prompts = (spread(found) if len(found := kind.residuals) else None for kind in self._recent)
        return decode, prompts

    def _error(self) -> float:
        """That of both kinds, each counting as often as it has come lately."""
        kinds = [(spread(found), len(found)) for kind in self._recent if len(found := kind.residuals)]
        return math.sqrt(sum(error**2 * count for error, count in kinds) / sum(count for _, count in kinds))


_RANKS = np.array([0.5 ** (rank / HALF_RANK) for rank in range(KEPT - 1, -1, -1)])  # the newest last


def unpacked(samples: bytes) -> Array:
    """Packed samples as rows [N, 6]."""
    return np.frombuffer(samples).reshape(-1, 6)


def vector(cost: StepCost) -> Array:
    """Its coefficients [5], in the order of COEFFICIENTS."""
    return np.array([getattr(cost, name) for name in COEFFICIENTS], dtype=np.float64)


def stated(coefficients: Array, *, error: float = 0.5, samples: int = 0) -> StepCost:
    named = dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True))
    return replace(StepCost(fixed=named.pop("fixed"), token=named.pop("token"), error=error, samples=samples), **named)


def refitted(steps: bytes, before: Array, fitted: Array) -> tuple[float, float] | None:
    """Of some packed steps, by a fit [5] and the one before it: medians of how far ln(observed / predicted) changes,
    and of that itself. None without steps.
    """
    if not steps:
        return None
    rows = unpacked(steps)
    ratios = log_ratios(rows, fitted)
    return median((ratios - log_ratios(rows, before)).tolist()), median(ratios.tolist())


def log_ratios(rows: Array, coefficients: Array) -> Array:
    """ln(observed / predicted) [N] of samples [N, 6]."""
    ratios: Array = np.log(rows[:, 5] / np.maximum(rows[:, :5] @ coefficients, 1e-12))
    return ratios


def spread(residuals: Array) -> float:
    """The root of the mean square, what lies beyond three standard deviations pulled in to there."""
    found = np.abs(residuals)
    count, ordered = len(residuals), np.sort(found)
    middle = float(ordered[(count - 1) // 2] + ordered[count // 2]) / 2  # np.median takes ten times as long
    most = max(LEAST_SPREAD, 3 * 1.4826 * middle)
    return max(LEAST_SPREAD, math.sqrt(float(np.add.reduce(np.minimum(found, most) ** 2)) / count))


def fit(x: Array, seconds: Array, weights: Array, prior: Array, unit: Array, looseness: float) -> Array:
    """Coefficients [5] for rows x [N, 5] that took `seconds` [N], of these `weights` [N].

    `prior` [5] times a common factor is what coefficients are drawn to, as if each were known to within `looseness` of
    itself, a tenth of `unit` [5] at least: what the rows tell outweighs it, what they leave open follows it.
    """
    factor = weighted_median(seconds / np.maximum(x @ prior, 1e-12), weights)
    centre = prior * factor
    width = looseness * (centre + 0.1 * unit * weighted_median(seconds / (x @ unit), weights))
    z, centre = x * width, centre / width  # in units of the prior's standard deviations
    theta, unity = centre, np.eye(z.shape[1])
    for _ in range(ROUNDS):
        predicted = np.maximum(z @ theta, 1e-12)
        residuals = np.abs(seconds / predicted - 1.0)
        deviation = max(LEAST_SPREAD, 1.4826 * weighted_median(residuals, weights))
        robust = np.minimum(1.0, TUNING * deviation / np.maximum(residuals, 1e-12))
        weighted = (weights * robust / predicted**2)[:, None] * z
        gram = z.T @ weighted + deviation**2 * unity
        theta = solve_nonnegative(gram, weighted.T @ seconds + deviation**2 * centre)
    result: Array = theta * width
    return result


def weighted_median(values: Array, weights: Array) -> float:
    order = values.argsort()
    sums = weights[order].cumsum()
    return float(values[order[sums.searchsorted(sums[-1] / 2)]])


def solve_nonnegative(gram: Array, right: Array) -> Array:
    """The θ ≥ 0 of least θᵀ·gram·θ/2 − right·θ, for gram [K, K] positive definite (Lawson and Hanson's active set)."""
    size = len(right)
    free = np.ones(size, dtype=bool)
    theta: Array = np.zeros(size)
    for _ in range(3 * size):
        every = free.all()
        if every:
            theta = np.asarray(np.linalg.solve(gram, right), dtype=np.float64)
        else:
            theta = np.zeros(size)
            if free.any():
                theta[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
        if (theta < 0).any():
            free &= theta > 0
            continue
        if every:
            return theta
        pull = np.where(free, 0.0, right - gram @ theta)
        if pull.max() <= 1e-9 * np.abs(right).max():
            return theta
        free[int(pull.argmax())] = True
    return np.maximum(theta, 0.0)
