"""A worker's drain: both of its sides have one time between them, as the platform ends it after one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from deploy.worker.worker import Worker


class LeavingSide:
    """A side that drains once all of them have begun to."""

    def __init__(self, begun: asyncio.Barrier):
        self.begun = begun
        self.draining = False
        self.seconds: list[float] = []

    async def drain(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await self.begun.wait()


async def test_both_sides_of_a_worker_drain_at_once() -> None:
    """One after the other, they would take twice the time."""
    begun = asyncio.Barrier(2)
    prefill, decode = LeavingSide(begun), LeavingSide(begun)
    worker = Worker.__new__(Worker)
    worker.prefill, worker.decode = cast(Any, prefill), cast(Any, decode)
    worker.connector = cast(Any, SimpleNamespace(flush=_no_flush))
    async with asyncio.timeout(60):
        await worker.drain(7.0)
    assert prefill.seconds == decode.seconds == [7.0] and prefill.draining


async def _no_flush(seconds: float) -> None:
    assert seconds <= 7.0
