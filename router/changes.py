"""What may have made room for requests that wait: counted, and told to whoever waits for the next.

It does not know what has changed, nor who looks for room.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Changes:
    """`recheck`: seconds after which a wait ends though nothing has changed; None: it goes on."""

    def __init__(self, recheck: float | None = None):
        self.recheck = recheck
        self.count = 0  # so far
        self._next: asyncio.Event | None = None  # while somebody waits for it

    def notify(self) -> None:
        """Something has changed."""
        self.count += 1
        changed, self._next = self._next, None
        if changed is not None:
            changed.set()

    async def next(self) -> None:
        """Wait for the first one from now on."""
        if self._next is None:
            self._next = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.recheck):  # wait_for would begin a task for every request
                await self._next.wait()
