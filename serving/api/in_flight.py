"""Counts the HTTP requests in progress, and refuses new ones while the server drains.

What stops the process waits here until the count is zero; no request is cut short from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import Unavailable

RETRY_AFTER = 5.0  # seconds, told to clients while the server drains


class InFlightRequests:
    """One for each app; used from its event loop only."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count one request in. Raises `Unavailable` once draining has begun."""
        if self.draining:
            raise Unavailable("the server is shutting down", code="draining", retry_after=RETRY_AFTER)
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    def begin_drain(self) -> None:
        """From now on new requests get a 503; those in progress go on."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Return when no request is in progress."""
        await self._idle.wait()
