"""A clock that only the test moves."""

from __future__ import annotations

import asyncio


class ManualClock:
    """Seconds that pass only when told; counts its readings, so that a server can wait until a chunk was seen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.now

    def expect_reading(self) -> None:
        """Forgets the readings so far; call it before the write whose arrival is waited for."""
        self._read.clear()

    async def reading(self) -> None:
        """Waits until the clock has been read since `expect_reading`."""
        await self._read.wait()
