"""Which block goes first when a tier is full: replaceable policies over names and sizes.

Pure: no clock, no bytes. Who may lose blocks at all (quotas, pins) is decided around a policy, in kvcache.pool.shelf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

SMALL_SHARE = 0.1  # of the bytes: S3-FIFO's probation
MOST_USES = 3  # uses are counted up to here
PROMOTION_USES = 2  # uses in probation that earn a place in the main queue


class EvictionPolicy(Protocol):
    """An order of eviction over the blocks it was told of. Sizes are in bytes."""

    def add(self, key: bytes, size: int) -> None:
        """A block that is not here yet has come."""
        ...

    def touch(self, key: bytes) -> None:
        """A block that is here was used."""
        ...

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        """The block has gone; `evicted` when it went as the victim, which a policy may want to remember."""
        ...

    def victims(self) -> Iterator[bytes]:
        """All that are here, what should go first first: the same order until something changes, which ends it."""
        ...

    def __len__(self) -> int: ...


class Lru:
    """The block that was used longest ago goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def add(self, key: bytes, size: int) -> None:
        self._order[key] = None

    def touch(self, key: bytes) -> None:
        self._order.move_to_end(key)

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        del self._order[key]

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class _Fifo:
    """A queue of sized keys that knows its bytes and gives up any of them at once."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.bytes = 0

    def push(self, key: bytes, size: int) -> None:
        self._sizes[key] = size
        self.bytes += size

    def take(self, key: bytes) -> int:
        size = self._sizes.pop(key)
        self.bytes -= size
        return size

    def __iter__(self) -> Iterator[bytes]:
        """The first that came first."""
        return iter(self._sizes)

    def rotate(self, key: bytes) -> None:
        self._sizes.move_to_end(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)


class S3Fifo:
    """Three queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

    A new block is on probation in a small queue. It leaves it for the main queue when it was used there, else for good;
    the ghost queue remembers the names of those, and what comes back while remembered goes to the main queue at once.
    The paper sizes the queues by the cache's capacity; here they are shares of what is held, so that the policy
    need not know how much that may be.
    """

    def __init__(self) -> None:
        self._small = _Fifo()
        self._main = _Fifo()
        self._ghost = _Fifo()
        self._uses: dict[bytes, int] = {}

    def add(self, key: bytes, size: int) -> None:
        remembered = key in self._ghost
        if remembered:
            self._ghost.take(key)
        (self._main if remembered else self._small).push(key, size)
        self._uses[key] = 0

    def touch(self, key: bytes) -> None:
        self._uses[key] = min(self._uses[key] + 1, MOST_USES)

    def remove(self, key: bytes, *, evicted: bool = False) -> None:
        del self._uses[key]
        queue = self._small if key in self._small else self._main
        size = queue.take(key)
        if evicted and queue is self._small:
            self._ghost.push(key, size)
        while self._ghost.bytes > self._small.bytes + self._main.bytes + size:
            self._ghost.take(next(iter(self._ghost)))

    def victims(self) -> Iterator[bytes]:
        first, second = self._small, self._main
        while self._uses:
            over = self._small.bytes > SMALL_SHARE * (self._small.bytes + self._main.bytes)
            first, second = (self._small, self._main) if over or not len(self._main) else (self._main, self._small)
            key = next(iter(first))
            if first is self._small and self._uses[key] >= PROMOTION_USES:
                self._main.push(key, self._small.take(key))
                self._uses[key] = 0
            elif first is self._main and self._uses[key]:
                self._main.rotate(key)
                self._uses[key] -= 1
            else:
                break
        yield from first
        yield from second

    def __len__(self) -> int:
        return len(self._uses)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru, "s3fifo": S3Fifo}
DEFAULT_POLICY = "lru"
