"""Whether a prefix comes quicker from the KV pool than from a prefill worker. Pure: no torch, no clock, no I/O.

It weighs what both have taken so far, in seconds a byte of KV as this worker stores it, however it travelled.
"""

from __future__ import annotations

from kvcache.connector.fetch_cost import PROBE_EVERY, SHARE, FetchCost


class HandoffMeter:
    """One handoff as its receiver sees it: what a byte took at best, `byte_seconds`; None before a second piece came.

    Most pieces wait for their layer to be computed. The quickest one did not, and tells what the way itself takes.
    """

    __slots__ = ("_last", "byte_seconds")

    def __init__(self) -> None:
        self.byte_seconds: float | None = None
        self._last: float | None = None

    def came(self, size: int, now: float) -> None:
        """A piece has been taken in that is `size` bytes where it lies now."""
        if self._last is not None and size > 0:
            seconds = max(0.0, now - self._last) / size
            self.byte_seconds = seconds if self.byte_seconds is None else min(self.byte_seconds, seconds)
        self._last = now


class DirectCost:
    """`fetch` is what the pool has taken; what handoffs take is told here.

    Until both have been measured the pool is always worth trying; after a failure it is left alone for a while.
    """

    def __init__(self, fetch: FetchCost):
        self.fetch = fetch
        self.byte_seconds: float | None = None  # of handoffs
        self._refused = 0
        self._resting = 0  # prefixes that are not tried before the next

    def handed_over(self, meter: HandoffMeter) -> None:
        """A handoff is complete."""
        new, old = meter.byte_seconds, self.byte_seconds
        if new is not None:
            self.byte_seconds = new if old is None else old + SHARE * (new - old)

    def failed(self) -> None:
        """The pool did not bring what it had, or not in time."""
        self._resting = PROBE_EVERY

    def pays(self, size: int) -> bool:
        """Whether `size` bytes are likely here from the pool no later than they would be from a prefill worker.

        What pays for some bytes pays for more. A refused pool is tried again now and then: it may be faster by now.
        """
        if self._resting:
            self._resting -= 1
            return False
        if self.fetch.byte_seconds is None or self.byte_seconds is None:
            return True
        worth = self.fetch.answer_seconds + size * self.fetch.byte_seconds <= size * self.byte_seconds
        self._refused = 0 if worth else self._refused + 1
        if self._refused >= PROBE_EVERY:
            self._refused = 0
            return True
        return worth

    def patience(self, size: int) -> float | None:
        """Seconds to wait for `size` bytes on their way before they are asked of the prefill worker; None: no bound.

        As long as that way would take: so the two together take at most twice what the better one had taken.
        """
        return None if self.byte_seconds is None else size * self.byte_seconds
