"""Holds requests back that may have broken workers: until it is known, while another of them is tried, or for good.

The rules are router.quarantine's; this waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.fleet import Fleet
from router.quarantine import SUSPECTED, Quarantine, Verdict
from router.refusals import broke_workers, deadline_passed
from router.request_state import RequestState

SETTLE_SECONDS = 0.1  # in which other requests hear of the same loss
TURN_SECONDS = 10.0  # that a request waits at most while others are tried: they may wait for room


class Isolation:
    """`enter` before a request is placed again. Leave what that returns once it has come on, or has ended."""

    def __init__(self, fleet: Fleet, quarantine: Quarantine):
        self.fleet = fleet
        self.quarantine = quarantine
        self._turn = asyncio.Lock()

    async def enter(self, state: RequestState) -> Callable[[], None] | None:
        """Nothing for a request that is not held back. Raises Quarantined, DeadlineExceeded."""
        if len(state.deaths) < SUSPECTED:
            return None
        deadline = state.request.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self.fleet.clock())):
                if await self._verdict(state) is Verdict.FREE:
                    return None
                return await self._alone()
        except TimeoutError:
            raise deadline_passed() from None

    async def _verdict(self, state: RequestState) -> Verdict:
        await asyncio.sleep(SETTLE_SECONDS)
        while (verdict := self.quarantine.verdict(state, self.fleet.clock())) is Verdict.OPEN:
            await self.fleet.change()
        if verdict is Verdict.QUARANTINED:
            raise broke_workers([death.name for death in state.deaths])
        return verdict

    async def _alone(self) -> Callable[[], None] | None:
        """Its turn; nothing where the one before takes too long."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            return None
        return self._turn.release
