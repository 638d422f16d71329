"""How soon a request may be tried again when tries fail faster than requests come. Pure: `now` comes in, in seconds.

A budget as in Finagle and Envoy: a share of the requests, and so many a second besides. Beyond it a retry waits
instead of being refused: each stands for a text that a client already reads.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import inf, isfinite

LONGEST_DOUBLING = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """`share` retries for each request and `per_second` besides, 0 for none; at most `most` are saved up."""

    share: float = 0.2
    per_second: float = 10.0
    most: float = 100.0


class RetryBudget:
    """Full at the beginning. It may go below zero: those are the retries that wait for their turn."""

    def __init__(self, config: RetryConfig, now: float):
        self.config = config
        self.balance = config.most
        self._seen = now

    def request(self, now: float) -> None:
        """A new request has come."""
        self._add(self.config.share, now)

    def retry(self, now: float) -> float:
        """Seconds this retry has to wait. Those that wait are let go in the order they asked, at `per_second`.

        Infinite where time earns nothing: such a retry is not let go at all, and takes nothing from later ones.
        """
        self._add(0.0, now)
        left, rate = self.balance - 1.0, self.config.per_second
        pause = 0.0 if left >= 0.0 else -left / rate if rate > 0.0 else inf
        if isfinite(pause):
            self.balance = left
        return pause

    def give_back(self, pause: float) -> None:
        """A retry that was told to wait so long is not made after all: those behind it need not wait for it."""
        if isfinite(pause):
            self.balance = min(self.config.most, self.balance + 1.0)

    def _add(self, amount: float, now: float) -> None:
        earned = self.config.per_second * max(0.0, now - self._seen)
        self._seen = max(self._seen, now)
        self.balance = min(self.config.most, self.balance + amount + earned)


def backoff(failures: int, first: float, salt: int) -> float:
    """Seconds to wait after so many failures in a row: whoever has lost a worker moves at once, then `first`, doubled
    for each further one. Up to half of it less, for each request otherwise: what broke at once is not tried at once.
    """
    if failures < 2:
        return 0.0
    chance = zlib.crc32(f"{salt}/{failures}".encode()) / 2**32
    return first * 2.0 ** min(failures - 2, LONGEST_DOUBLING) * (1.0 - chance / 2)
