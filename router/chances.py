"""Chances that what was predicted is within a limit, where ln(actual / predicted) is normal. Pure arithmetic."""

from __future__ import annotations

from math import erf, exp, inf, log, sqrt

LEAST_ERROR = 0.05  # of a prediction: nothing is known better

_ROOT_2 = sqrt(2.0)
SURE = 6.1 * _ROOT_2  # standard deviations from which on a chance is 0.0 or 1.0: erf(6.1) is 1.0
MOST_EXPONENT = 700.0


def within(limit: float, predicted: float, error: float) -> float:
    """P(actual ≤ limit) where ln(actual / predicted) is normal with mean 0 and standard deviation `error`."""
    if limit <= 0.0:
        return 0.0
    if predicted <= 0.0:
        return 1.0
    ratio = limit / predicted
    if not ratio > 0.0:  # beyond numbers
        return 0.0
    return 0.5 * (1.0 + erf(log(ratio) / ((error if error > LEAST_ERROR else LEAST_ERROR) * _ROOT_2)))


def sure_ratio(error: float) -> float:
    """A limit that is so many times what is predicted holds by 1.0, and one of which that is so many times by 0.0."""
    exponent = SURE * (error if error > LEAST_ERROR else LEAST_ERROR)
    return exp(exponent) if exponent < MOST_EXPONENT else inf


def less_likely(limit: float, before: float, after: float, error: float, sure: float) -> float:
    """P(before ≤ limit) − P(after ≤ limit), as `within` has them; `sure` is the sure_ratio of the error.

    Most limits are far from both, and a choice asks for hundreds: where the answer is 0.0 no logarithm is taken.
    """
    if before * sure <= limit and after * sure <= limit:
        return 0.0
    most = limit * sure
    if before >= most and after >= most:
        return 0.0
    if before > 0.0 and after > 0.0 and limit > 0.0:
        first, then = limit / before, limit / after
        if first > 0.0 and then > 0.0:  # `within` twice, without its calls
            scale = (error if error > LEAST_ERROR else LEAST_ERROR) * _ROOT_2
            return 0.5 * (1.0 + erf(log(first) / scale)) - 0.5 * (1.0 + erf(log(then) / scale))
    return within(limit, before, error) - within(limit, after, error)
