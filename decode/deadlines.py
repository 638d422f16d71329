"""Watches the deadlines of leases: what has passed its own is ended, whether it waits for KV or decodes.

A timer of the event loop for each lease that has a deadline; it knows neither sequences nor blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadlines:
    """`expire` is called on the event loop with the lease whose deadline has passed, once, unless it was forgotten."""

    def __init__(self, expire: Callable[[str], None]):
        self.expire = expire
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, lease: str, seconds: float | None) -> None:
        """The lease's deadline is so many seconds from now, None: it has none. A deadline given before counts no more.

        Call on the event loop.
        """
        self.forget(lease)
        if seconds is not None:
            self._timers[lease] = asyncio.get_running_loop().call_later(seconds, self._pass, lease)

    def forget(self, lease: str) -> None:
        """Safe to repeat."""
        timer = self._timers.pop(lease, None)
        if timer is not None:
            timer.cancel()

    def _pass(self, lease: str) -> None:
        del self._timers[lease]
        self.expire(lease)

    @property
    def watched(self) -> int:
        return len(self._timers)
