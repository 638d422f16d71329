"""Who waits for room and in what order: a bounded queue in which continuations go before new requests.

Pure but for the futures its callers wait on; patience is kept by the caller.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from serving.errors import Overloaded

CONTINUATION = 0  # a request the client already sees tokens of
NEW = 1


class AdmissionQueue:
    """Lets one request at a time look for a place; the others queue by (priority, arrival)."""

    def __init__(self, max_waiting: int):
        self.max_waiting = max_waiting
        self._busy = False
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    @property
    def waiting(self) -> int:
        """Requests in the queue and the one looking."""
        return sum(not ticket.done() for _, _, ticket in self._queue) + self._busy

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """Wait for one's turn. Raises Overloaded at once when too many new requests wait already."""
        if priority == NEW and self.waiting > self.max_waiting:
            raise Overloaded(f"{self.waiting} requests wait for room already", code="queue_full", retry_after=1.0)
        await self._enter(priority)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, priority: int) -> None:
        if not self._busy:
            self._busy = True
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), ticket))
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self._leave()  # our turn came in the moment we left: pass it on
            else:
                ticket.cancel()
            raise

    def _leave(self) -> None:
        while self._queue:
            _, _, ticket = heapq.heappop(self._queue)
            if not ticket.done():
                ticket.set_result(None)
                return
        self._busy = False
