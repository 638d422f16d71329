"""What waits, by client: each client's in its own order, and clients in turn. Pure.

It knows neither bounds nor what waits: those are the affair of whoever lets clients wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ClientTurns(Generic[T]):
    """A client that comes anew, or has just had its turn, is the last."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # clients; the next one first, none without items

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def count(self, client: str) -> int:
        """How many items of the client wait."""
        return len(self._waiting.get(client, ()))

    def add(self, client: str, item: T) -> None:
        """Behind those of the same client."""
        self._waiting.setdefault(client, deque()).append(item)

    def next(self, may: Callable[[str], bool] = lambda _: True) -> tuple[str, T] | None:
        """The next client that `may` have its turn, and its oldest item, which waits no more; None without one."""
        client = next((name for name in self._waiting if may(name)), None)
        if client is None:
            return None
        items = self._waiting.pop(client)
        item = items.popleft()
        if items:
            self._waiting[client] = items
        return client, item

    def take_out(self, client: str, wanted: Callable[[T], bool]) -> T | None:
        """The client's first item that is wanted, which waits no more; None where there is none."""
        items = self._waiting.get(client, deque())
        place = next((number for number, item in enumerate(items) if wanted(item)), None)
        if place is None:
            return None
        item = items[place]
        del items[place]
        if not items:
            del self._waiting[client]
        return item
