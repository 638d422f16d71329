"""How fast weights may be copied beside serving: a token bucket over bytes. Pure: its clock is given to it."""

from __future__ import annotations


class ByteBudget:
    """So many bytes a second, and `burst` bytes at once after a pause.

    In any time t no more than `burst` + t * `bytes_per_second` bytes go, if everyone waits as long as told.
    """

    def __init__(self, bytes_per_second: float, burst: int, now: float) -> None:
        if bytes_per_second <= 0 or burst < 1:
            raise ValueError(f"a budget of {bytes_per_second:g} bytes/s and {burst} bytes at once lets nothing go")
        self.bytes_per_second, self.burst = bytes_per_second, burst
        self._left, self._seen = float(burst), now

    def spend(self, size: int, now: float) -> float:
        """Seconds until these bytes may go; they count as gone. Raises ValueError for more than go at once."""
        if size > self.burst:
            raise ValueError(f"{size} bytes are more than the {self.burst} that may go at once")
        self._left = min(self._left + (now - self._seen) * self.bytes_per_second, float(self.burst)) - size
        self._seen = now
        return max(0.0, -self._left / self.bytes_per_second)
