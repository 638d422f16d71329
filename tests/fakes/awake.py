"""Time in which this process could run: what a machine that stands still, or has no core for us, adds to a measurement.

For tests that hold the product to seconds by the clock. It knows of this process alone, and not which others waited.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import pytest

TICK = 0.005  # seconds from one look at the clock to the next
LATE = 4 * TICK  # a look that comes later than this was kept from coming
STANDSTILL = 0.1  # seconds without a look after which deadlines of a test may have passed for nobody's fault
FAILURES = (Exception, pytest.fail.Exception)
SITTINGS = 4  # of a test that fails beside standstills, before it is believed


class Awake:
    """Watches the clock from a thread of its own, while it is entered."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []  # of the monotonic clock, in order
        self._seen = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="awake", daemon=True)

    def __enter__(self) -> Self:
        self._seen = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self, began: float, ended: float | None = None) -> float:
        """Of those from `began` to `ended`, or to now, by the monotonic clock: without those in which it did not look.

        All count from when it was left on.
        """
        ended = time.monotonic() if ended is None else ended
        gaps = [*self._gaps]
        if not self._ended.is_set():  # it may not have looked since
            gaps.append(self._gap(self._seen, max(ended, self._seen)))
        asleep = sum(max(0.0, min(end, ended) - max(start, began)) for start, end in gaps)
        return ended - began - asleep

    def stood_still(self) -> bool:
        """True if the process could not run for a while, since it was entered."""
        gaps = [*self._gaps, self._gap(self._seen, time.monotonic())]
        return any(end - start >= STANDSTILL for start, end in gaps)

    def _watch(self) -> None:
        while not self._ended.wait(TICK):
            now = time.monotonic()
            if now - self._seen > LATE:
                self._gaps.append(self._gap(self._seen, now))
            self._seen = now

    @staticmethod
    def _gap(seen: float, now: float) -> tuple[float, float]:
        """What is missing between two looks; nothing where the second is not late."""
        return (seen + TICK, now) if now - seen > LATE else (now, now)


def retaken(test: Callable[..., Any]) -> Callable[..., Any]:
    """Has a test that fails while the machine stands still run again, with the same fixtures.

    For tests whose subject is a deadline of less than such a standstill. A failure without one counts at once.
    """

    def is_believed(awake: Awake, sitting: int) -> bool:
        return sitting == SITTINGS or not awake.stood_still()

    @functools.wraps(test)
    def taken(*given: Any, **fixtures: Any) -> None:
        for sitting in range(1, SITTINGS + 1):
            with Awake() as awake:
                try:
                    return test(*given, **fixtures)
                except FAILURES:
                    if is_believed(awake, sitting):
                        raise
        return None

    @functools.wraps(test)
    async def taken_in_a_loop(*given: Any, **fixtures: Any) -> None:
        for sitting in range(1, SITTINGS + 1):
            with Awake() as awake:
                try:
                    return await test(*given, **fixtures)
                except FAILURES:
                    if is_believed(awake, sitting):
                        raise
        return None

    return taken_in_a_loop if inspect.iscoroutinefunction(test) else taken
