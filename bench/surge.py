"""Loads that change while they last, and what came of each kind of request before, during and after.

Pure: spans of load in, requests with their times out; outcomes in, figures out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.mixture import Mixture, RequestKind, TimedAsk
from bench.sse import Outcome

WINDOW = 5.0  # seconds of arrivals that one look at attainment covers
STEP = 0.5  # seconds between such looks
RECOVERED = 0.9  # of the attainment before
REFUSED = ("HTTP 429", "HTTP 503")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpan:
    """So many seconds in which requests of each kind named come at a rate, in requests a second."""

    name: str
    seconds: float
    rates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Arrived:
    """What became of a request that came `at` seconds after the beginning."""

    at: float
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanFigures:
    """Of one kind of request in one span: how many there were, and what became of them. Latencies in seconds."""

    kind: str
    span: str
    offered: int
    met: int
    completed: int
    refused: int
    failed: int
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]

    @property
    def attainment(self) -> float:
        return self.met / self.offered if self.offered else 0.0


def timed_in_spans(
    kinds: Sequence[RequestKind], spans: Sequence[LoadSpan], *, seed: int, fresh: Sequence[int] = ()
) -> list[TimedAsk]:
    """Poisson arrivals of each kind in each span, in the order of time."""
    found: list[TimedAsk] = []
    begin = 0.0
    for number, span in enumerate(spans):
        for place, kind in enumerate(kinds):
            rate = span.rates.get(kind.name, 0.0)
            count = round(rate * span.seconds)
            if count:
                own = Mixture(name=kind.name, kinds=(kind,))
                asked = own.timed(rate, count, seed=seed + 101 * number + 10_007 * place, fresh=(*fresh, number, place))
                shift = begin + 0.5 / rate  # so that spans do not all begin with one request of each kind
                found += [TimedAsk(shift + one.at, one.kind, one.ask) for one in asked]
        begin += span.seconds
    return sorted(found, key=lambda one: one.at)


def bounds(spans: Sequence[LoadSpan]) -> list[tuple[LoadSpan, float, float]]:
    """Each span with its first and last second."""
    found = []
    begin = 0.0
    for span in spans:
        found.append((span, begin, begin + span.seconds))
        begin += span.seconds
    return found


def figures(arrived: Sequence[Arrived], kinds: Sequence[RequestKind], spans: Sequence[LoadSpan]) -> list[SpanFigures]:
    """Of every kind in every span, by when requests came."""
    found = []
    for kind in kinds:
        for span, first, last in bounds(spans):
            within = [one.outcome for one in arrived if one.outcome.kind == kind.name and first <= one.at < last]
            good = [outcome for outcome in within if outcome.error is None]
            refused = sum(outcome.error in REFUSED for outcome in within)
            found.append(
                SpanFigures(
                    kind=kind.name,
                    span=span.name,
                    offered=len(within),
                    met=sum(map(kind.slo.met, within)),
                    completed=len(good),
                    refused=refused,
                    failed=len(within) - len(good) - refused,
                    ttft=tuple(outcome.ttft for outcome in good),
                    tpot=tuple(outcome.tpot for outcome in good if outcome.tpot is not None),
                )
            )
    return found


def windows(
    arrived: Sequence[Arrived], kind: RequestKind, first: float, last: float, *, step: float = STEP
) -> list[tuple[float, float]]:
    """The share attained by requests of each WINDOW of arrivals that lies in the span, by its first second."""
    own = [one for one in arrived if one.outcome.kind == kind.name]
    found = []
    for number in range(int((last - first - WINDOW) / step + 1e-9) + 1):
        begin = first + number * step
        within = [kind.slo.met(one.outcome) for one in own if begin <= one.at < begin + WINDOW]
        if within:
            found.append((begin, sum(within) / len(within)))
    return found


def recovery_seconds(
    arrived: Sequence[Arrived], kind: RequestKind, end: float, last: float, before: float
) -> float | None:
    """How long after `end` requests come that attain as before again, until `last`; None if they do not.

    The first second from which on every window attains RECOVERED of `before`.
    """
    looks = windows(arrived, kind, end, last)
    bad = [number for number, (_, share) in enumerate(looks) if share < RECOVERED * before]
    if not looks or (bad and bad[-1] == len(looks) - 1):
        return None
    return looks[bad[-1] + 1][0] - end if bad else 0.0
