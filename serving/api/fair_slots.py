"""Slots for work that is done a few at a time: clients take turns for them, and none has them all.

For one event loop; what the work is it may not know.
"""

from __future__ import annotations

from asyncio import CancelledError, Future, get_running_loop
from collections import Counter

from serving.api.turns import ClientTurns
from serving.errors import Overloaded

RETRY_AFTER = 1.0  # seconds


class FairSlots:
    """`slots` in all, `per_client` of them for one client, which may have `most_waiting` more that wait."""

    def __init__(self, slots: int, *, per_client: int, most_waiting: int):
        self._free = slots
        self._per_client = per_client
        self._most_waiting = most_waiting
        self._taken: Counter[str] = Counter()
        self._waiting: ClientTurns[Future[None]] = ClientTurns()

    async def take(self, client: str) -> None:
        """Wait for a slot; `give_back` what was taken. Raises Overloaded where the client has too many waiting."""
        waiting = self._waiting.count(client)
        if self._may_take(client) and not waiting:
            self._take(client)
            return
        if waiting >= self._most_waiting:
            raise Overloaded("too many requests of yours wait to be read; try again later", retry_after=RETRY_AFTER)
        turn: Future[None] = get_running_loop().create_future()
        self._waiting.add(client, turn)
        try:
            await turn
        except CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(client)
            else:
                self._waiting.take_out(client, lambda waits: waits is turn)
            raise

    def give_back(self, client: str) -> None:
        self._free += 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        while (found := self._waiting.next(self._may_take)) is not None:
            name, turn = found
            if not turn.done():  # cancelled, and not told yet
                self._take(name)
                turn.set_result(None)

    def _may_take(self, client: str) -> bool:
        return self._free > 0 and self._taken[client] < self._per_client

    def _take(self, client: str) -> None:
        self._free -= 1
        self._taken[client] += 1
