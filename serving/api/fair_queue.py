"""A queue in which clients take turns, each in the order of its own items, with bounds on what may wait. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from serving.api.turns import ClientTurns
from serving.errors import Overloaded

RETRY_AFTER = 2.0  # seconds

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Holds `most` items and `most_bytes` at most. A client has at most half of either, but that the only one it
    has may be of any size there is room for: what others may need is kept free for them whether they wait or not.
    """

    def __init__(self, most: int, most_bytes: int):
        self._most = most
        self._most_bytes = most_bytes
        self._waiting: ClientTurns[tuple[int, T]] = ClientTurns()
        self._bytes: Counter[str] = Counter()  # of each client's items

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def held_bytes(self) -> int:
        return self._bytes.total()

    def put(self, client: str, size: int, item: T) -> None:
        """An item of `size` bytes, behind those of the same client. Raises Overloaded."""
        own, own_bytes = self._waiting.count(client), self._bytes[client]
        full = len(self) >= self._most or self.held_bytes + size > self._most_bytes
        greedy = own >= self._most // 2 or own_bytes + size > self._most_bytes // 2
        if full or (greedy and own):
            raise Overloaded("too many large bodies wait to be read", code="bodies_waiting", retry_after=RETRY_AFTER)
        self._waiting.add(client, (size, item))
        self._bytes[client] += size

    def discard(self, client: str, item: T) -> None:
        """Take out this very item, where it still waits."""
        found = self._waiting.take_out(client, lambda waiting: waiting[1] is item)
        if found is not None:
            self._leave(client, found[0])

    def pop(self) -> T:
        """The next client's oldest item; that client's next one comes after the others' turns."""
        found = self._waiting.next()
        assert found is not None, "only a queue that holds something is popped"
        client, (size, item) = found
        self._leave(client, size)
        return item

    def _leave(self, client: str, size: int) -> None:
        """An item of it does not wait any more; without items it has no bytes."""
        self._bytes[client] -= size
        if not self._bytes[client]:
            del self._bytes[client]
