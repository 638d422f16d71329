"""What came of simulated requests, and figures over many: attainment, latencies, backlog.

Pure. A request that was refused, failed or never ended has missed its objectives like one that was late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.messages import FinishReason, Request


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """One request. Seconds on the virtual clock; `error` is the code or class of what ended it before its time."""

    request: Request
    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    placed: list[tuple[str, str]] = field(default_factory=list)  # worker, and `decode` or `prefill` there

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first; None with fewer than two."""
        if self.first_token is None or self.last_token is None or len(self.tokens) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self.tokens) - 1)

    @property
    def met(self) -> bool:
        """Ended by itself and within both objectives; a single token has no TPOT to miss."""
        slo, ttft = self.request.slo, self.ttft
        if self.error is not None or self.finish is None or ttft is None:
            return False
        if slo.ttft_ms is not None and ttft * 1e3 > slo.ttft_ms:
            return False
        return slo.tpot_ms is None or (self.tpot or 0.0) * 1e3 <= slo.tpot_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class RateFigures:
    """Over the requests of one rate. Milliseconds; a quantile without any value is NaN."""

    rate: float
    offered: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    backlog_slope: float  # requests a second by which those in the system grow: 0 where the rate can be kept up
    errors: dict[str, int]
    seconds: float = 0.0  # virtual, of all runs until their last request ended

    @property
    def good_rate(self) -> float:
        return self.rate * self.attainment


def figures(rate: float, runs: Sequence[Sequence[RequestOutcome]]) -> RateFigures:
    """All runs at one rate, each with a seed of its own."""
    every = [outcome for run in runs for outcome in run]
    ttfts = [outcome.ttft * 1e3 for outcome in every if outcome.ttft is not None]
    tpots = [outcome.tpot * 1e3 for outcome in every if outcome.tpot is not None]
    return RateFigures(
        rate=rate,
        offered=len(every),
        attainment=_share(outcome.met for outcome in every),
        ttft_attainment=_share(_met_ttft(outcome) for outcome in every),
        tpot_attainment=_share(_met_tpot(outcome) for outcome in every),
        ttft_p50=_quantile(ttfts, 0.5),
        ttft_p90=_quantile(ttfts, 0.9),
        tpot_p50=_quantile(tpots, 0.5),
        tpot_p90=_quantile(tpots, 0.9),
        backlog_slope=float(np.mean([backlog_slope(run) for run in runs])),
        errors=dict(Counter(outcome.error for outcome in every if outcome.error is not None).most_common()),
        seconds=sum(max((outcome.ended or 0.0 for outcome in run), default=0.0) for run in runs),
    )


def backlog_slope(run: Sequence[RequestOutcome]) -> float:
    """Least squares over the second half of the arrivals: requests in the system against time, one a second."""
    half = sorted(outcome.arrived for outcome in run)[len(run) // 2 :]
    if len(half) < 2 or half[0] == half[-1]:
        return 0.0
    arrived = np.sort([outcome.arrived for outcome in run])
    ended = np.sort([outcome.ended for outcome in run if outcome.ended is not None])
    inside = np.searchsorted(arrived, half, side="right") - np.searchsorted(ended, half, side="right")
    return float(np.polyfit(half, inside, 1)[0])


def _met_ttft(outcome: RequestOutcome) -> bool:
    limit, ttft = outcome.request.slo.ttft_ms, outcome.ttft
    return outcome.error is None and ttft is not None and (limit is None or ttft * 1e3 <= limit)


def _met_tpot(outcome: RequestOutcome) -> bool:
    limit = outcome.request.slo.tpot_ms
    return (
        outcome.error is None and outcome.finish is not None and (limit is None or (outcome.tpot or 0) * 1e3 <= limit)
    )


def _share(values: Iterable[bool]) -> float:
    counted = list(values)
    return sum(counted) / len(counted) if counted else 0.0


def _quantile(values: Sequence[float], level: float) -> float:
    return float(np.quantile(values, level)) if values else float("nan")
