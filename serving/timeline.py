"""The timestamped events of one request, from which every latency is computed. It reads no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Moment(StrEnum):
    """What can happen to a request, in the order it usually does."""

    ARRIVED = "arrived"
    LEASED = "leased"
    PREFILL_SENT = "prefill_sent"
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    REPLACED = "replaced"
    FINISHED = "finished"


@dataclass(slots=True)
class Timeline:
    """Seconds on the router's clock. Repeated events (a second lease, another prefill try) are all kept."""

    events: list[tuple[Moment, float]] = field(default_factory=list)
    tokens: int = 0  # output tokens so far
    last_token: float | None = None

    def note(self, moment: Moment, now: float) -> None:
        self.events.append((moment, now))

    def first(self, moment: Moment) -> float | None:
        for what, at in self.events:
            if what is moment:
                return at
        return None

    def between(self, begin: Moment, end: Moment) -> float | None:
        """Seconds from the first `begin` to the first `end`, or None if either never happened."""
        began, ended = self.first(begin), self.first(end)
        return None if began is None or ended is None else ended - began

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        first = self.first(Moment.FIRST_TOKEN)
        if first is None or self.last_token is None or self.tokens < 2:
            return None
        return (self.last_token - first) / (self.tokens - 1)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last: 0 for a single one, None before any."""
        first = self.first(Moment.FIRST_TOKEN)
        return None if first is None else max(first, self.last_token or first) - first
