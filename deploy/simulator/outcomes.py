"""What came of simulated requests, and figures over many: attainment, latencies, backlog.

Pure. A request that was refused, failed or never ended has missed its objectives like one that was late. A few numbers
of each are kept, so that figures over millions are exact.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serving.messages import FinishReason, Request

Floats = NDArray[np.float64]
NAN = float("nan")


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
    backlog_slope: float  # requests a second by which those inside grow: 0 where the rate can be kept up, NaN: unknown
    errors: dict[str, int]
    seconds: float = 0.0  # virtual, of all runs until their last request ended
    whole: bool = True  # False: broken off, and these are the requests that had ended

    @property
    def good_rate(self) -> float:
        return self.rate * self.attainment


class OutcomeColumns:
    """What figures need of the requests of a run: 32 bytes each. `whole` is False of a run that was broken off.

    `arrived` and `ended` are seconds on the virtual clock, NaN where it never ended; `ttft` and `tpot` in milliseconds,
    NaN where there is none.
    """

    def __init__(self, outcomes: Iterable[RequestOutcome] = ()) -> None:
        self.arrived, self.ended, self.ttft, self.tpot = (array("d") for _ in range(4))
        self.met = self.met_ttft = self.met_tpot = 0
        self.errors: Counter[str] = Counter()
        self.whole = True
        for outcome in outcomes:
            self.add(outcome)

    def __len__(self) -> int:
        return len(self.arrived)

    def add(self, outcome: RequestOutcome) -> None:
        """A request that has ended."""
        ttft, tpot = outcome.ttft, outcome.tpot
        self.arrived.append(outcome.arrived)
        self.ended.append(NAN if outcome.ended is None else outcome.ended)
        self.ttft.append(NAN if ttft is None else ttft * 1e3)
        self.tpot.append(NAN if tpot is None else tpot * 1e3)
        self.met += outcome.met
        self.met_ttft += _met_ttft(outcome)
        self.met_tpot += _met_tpot(outcome)
        if outcome.error is not None:
            self.errors[outcome.error] += 1

    @property
    def seconds(self) -> float:
        """When the last request ended."""
        return float(np.nanmax(self.ended)) if len(_known([self.ended])) else 0.0

    @property
    def backlog_slope(self) -> float:
        """Least squares over the second half of the arrivals: requests inside against time, one a second."""
        arrived = np.sort(np.asarray(self.arrived))
        half = arrived[len(arrived) // 2 :]
        if len(half) < 2 or half[0] == half[-1]:
            return 0.0
        ended = np.sort(_known([self.ended]))
        inside = np.searchsorted(arrived, half, side="right") - np.searchsorted(ended, half, side="right")
        return float(np.polyfit(half, inside, 1)[0])


def figures(rate: float, runs: Sequence[OutcomeColumns]) -> RateFigures:
    """All runs at one rate, each with a seed of its own."""
    offered = sum(map(len, runs))
    ttfts, tpots = _known([run.ttft for run in runs]), _known([run.tpot for run in runs])
    errors = sum((run.errors for run in runs), Counter[str]())
    whole = all(run.whole for run in runs)
    return RateFigures(
        rate=rate,
        offered=offered,
        attainment=sum(run.met for run in runs) / max(1, offered),
        ttft_attainment=sum(run.met_ttft for run in runs) / max(1, offered),
        tpot_attainment=sum(run.met_tpot for run in runs) / max(1, offered),
        ttft_p50=_quantile(ttfts, 0.5),
        ttft_p90=_quantile(ttfts, 0.9),
        tpot_p50=_quantile(tpots, 0.5),
        tpot_p90=_quantile(tpots, 0.9),
        backlog_slope=float(np.mean([run.backlog_slope for run in runs])) if whole else NAN,
        errors=dict(sorted(errors.items(), key=lambda item: (-item[1], item[0]))),
        seconds=sum(run.seconds for run in runs),
        whole=whole,
    )


def _known(columns: Sequence[array[float]]) -> Floats:
    """All their numbers together, without NaN."""
    every = np.concatenate([np.asarray(column) for column in columns]) if columns else np.empty(0)
    return every[~np.isnan(every)]


def _met_ttft(outcome: RequestOutcome) -> bool:
    limit, ttft = outcome.request.slo.ttft_ms, outcome.ttft
    return outcome.error is None and ttft is not None and (limit is None or ttft * 1e3 <= limit)


def _met_tpot(outcome: RequestOutcome) -> bool:
    limit = outcome.request.slo.tpot_ms
    return (
        outcome.error is None and outcome.finish is not None and (limit is None or (outcome.tpot or 0) * 1e3 <= limit)
    )


def _quantile(values: Floats, level: float) -> float:
    return float(np.quantile(values, level)) if len(values) else float("nan")
