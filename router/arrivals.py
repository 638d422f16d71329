"""Which prompts get their first tokens in time from a worker, and are likely to go on coming. Pure: `now` comes in."""

from __future__ import annotations

from math import log2
from operator import attrgetter
from typing import NamedTuple

from serving.share import Rate

MOST_KINDS = 16  # that are remembered of a worker
MOST_TOLD = 4  # of them, those that come most often
NEWEST = 0.1  # weight of the newest prompt in the means of its kind
LEAST_LIMIT = 1e-3  # seconds: objectives below that are of one kind


class Arrivals(NamedTuple):
    """Prompts of one kind, which are likely to go on coming as they have.

    `rate` a second, by the weights of their classes; `limit` seconds of their TTFT objective, of which each takes
    `seconds` to be computed.
    """

    priority: int
    limit: float
    seconds: float
    rate: float


class ArrivalRates:
    """Those whose first tokens have come from one worker in time. A kind is a priority and about a TTFT objective."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], tuple[Rate, float, float]] = {}  # and means of limits and of seconds

    def note(self, prompt: Arrivals, now: float) -> None:
        """One has come: its `rate` is its weight."""
        kind = prompt.priority, round(log2(max(LEAST_LIMIT, prompt.limit)))
        rate, limit, seconds = self._kinds.get(kind) or (Rate(), prompt.limit, prompt.seconds)
        rate.note(prompt.rate, now)
        limit, seconds = limit + NEWEST * (prompt.limit - limit), seconds + NEWEST * (prompt.seconds - seconds)
        self._kinds[kind] = rate, limit, seconds
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[min(self._kinds, key=lambda kind: self._kinds[kind][0].of(now))]

    def expected(self, now: float) -> tuple[Arrivals, ...]:
        """How many of each kind are likely to come a second, the most frequent kinds first."""
        kinds = [Arrivals(kind[0], limit, mean, rate.of(now)) for kind, (rate, limit, mean) in self._kinds.items()]
        return tuple(sorted(kinds, key=attrgetter("rate"), reverse=True)[:MOST_TOLD])
