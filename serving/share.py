"""Shares and rates as means over the last seconds. Pure: `now` comes in."""

from __future__ import annotations

from math import exp, expm1

MEAN_SECONDS = 10.0  # that means are over
LONGEST_GAP = 1.0  # seconds that one look at a share counts for


class Share:
    """The share of many that are so. It begins with 1.

    Each look is weighed by the time since the one before: many at once change nothing.
    """

    __slots__ = ("_seen", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._seen: float | None = None

    def look(self, part: int, whole: int, now: float) -> float:
        """`part` of `whole` are so now; the share, this look included. Nothing of nothing changes nothing."""
        gap = min(LONGEST_GAP, max(0.0, now - self._seen)) if self._seen is not None else 0.0
        self._seen = now if self._seen is None else max(self._seen, now)
        if whole > 0:
            self.share += (min(1.0, max(0, part) / whole) - self.share) * -expm1(-gap / MEAN_SECONDS)
        return self.share


class Rate:
    """How much comes a second: each event fades with time."""

    __slots__ = ("_at", "_rate")

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def note(self, amount: float, now: float) -> None:
        """So much has come now."""
        self._rate = self.of(now) + amount / MEAN_SECONDS
        self._at = max(self._at, now)

    def of(self, now: float) -> float:
        """So much a second."""
        return self._rate * exp(-max(0.0, now - self._at) / MEAN_SECONDS)
