"""Which connections an HTTP server has, and which one makes room when there are too many. It knows no sockets.

A connection is idle while no request of it is being answered: it is new, sends headers, or is kept for the next one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class ConnectionEnd(StrEnum):
    """Why the server ended a connection; `/metrics` counts by it."""

    CONNECTIONS = "connections"  # too many in all, and none idle
    ADDRESS = "address"  # too many of one address, and none idle
    EVICTED = "evicted"  # idle when another one came
    SILENT = "silent"  # nothing was ever sent
    HEADER_TIMEOUT = "header_timeout"
    HEADER_SIZE = "header_size"
    HEADER_COUNT = "header_count"
    PIPELINED = "pipelined"  # too many requests sent ahead
    BODY_PIECES = "body_pieces"  # a body in very many very small pieces
    MALFORMED = "malformed"  # not HTTP
    KEEP_ALIVE = "keep_alive"  # no further request came
    BODY_UNREAD = "body_unread"  # answered while the body was still being sent
    SEND_TIMEOUT = "send_timeout"  # the client took nothing of its answer


@dataclass(frozen=True, slots=True)
class Admission(Generic[C]):
    """What becomes of a new connection: `refused` says why it may not stay; `evicted` has to be closed for it."""

    refused: ConnectionEnd | None = None
    evicted: C | None = None


class ConnectionTable(Generic[C]):
    """At most `most` connections, `most_of_address` of them from one network; 0 stands for any number.

    Where one is too many, an idle one goes: of the same network where that has too many, else of one that has most of
    the idle ones, so that a crowd makes room for itself before anybody else has to; there the one idle for longest.
    """

    def __init__(self, most: int, most_of_address: int):
        self.most = most
        self.most_of_address = most_of_address
        self.ended: Counter[ConnectionEnd] = Counter()
        self._network: dict[C, str] = {}
        self._count: Counter[str] = Counter()
        self._idle_of: dict[str, OrderedDict[C, None]] = {}  # by network, idle for longest first; none that is empty
        self._idle_count = 0
        self._crowds: dict[int, OrderedDict[str, None]] = {}  # by the number of their idle ones; none that is empty

    def __len__(self) -> int:
        return len(self._network)

    def of(self, network: str) -> int:
        """Connections of one network."""
        return self._count[network]

    @property
    def idle_count(self) -> int:
        return self._idle_count

    def admit(self, connection: C, network: str) -> Admission[C]:
        """Take a connection in, as an idle one, unless it is refused. One that is evicted has left."""
        evicted: C | None = None
        if self.most_of_address and self._count[network] >= self.most_of_address:
            evicted = next(iter(self._idle_of.get(network, ())), None)
            full: ConnectionEnd | None = ConnectionEnd.ADDRESS
        elif self.most and len(self) >= self.most:
            evicted = next(iter(self._idle_of.get(self._most_idle(), ())), None)
            full = ConnectionEnd.CONNECTIONS
        else:
            full = None
        if full is not None and evicted is None:
            self.ended[full] += 1
            return Admission(refused=full)
        if evicted is not None:
            self.ended[ConnectionEnd.EVICTED] += 1
            self.leave(evicted)
        self._network[connection] = network
        self._count[network] += 1
        self.idle(connection)
        return Admission(evicted=evicted)

    def idle(self, connection: C) -> None:
        """It waits from now on, if it did not before; nothing happens to one that has left."""
        network = self._network.get(connection)
        if network is None or connection in self._idle_of.get(network, ()):
            return
        idle = self._idle_of.setdefault(network, OrderedDict())
        self._resized(network, len(idle), len(idle) + 1)
        idle[connection] = None

    def busy(self, connection: C) -> None:
        """A request of it is being answered: it is not evicted."""
        network = self._network.get(connection)
        if network is None or connection not in self._idle_of.get(network, ()):
            return
        idle = self._idle_of[network]
        self._resized(network, len(idle), len(idle) - 1)
        del idle[connection]
        if not idle:
            del self._idle_of[network]

    def _resized(self, network: str, before: int, after: int) -> None:
        """A network has so many idle connections now."""
        self._idle_count += after - before
        if before:
            del self._crowds[before][network]
            if not self._crowds[before]:
                del self._crowds[before]
        if after:
            self._crowds.setdefault(after, OrderedDict())[network] = None

    def _most_idle(self) -> str:
        """A network that has most of the idle connections; of several the one that has had so many for longest.

        There are few sizes: n different ones take more than n²/2 connections.
        """
        return next(iter(self._crowds[max(self._crowds)])) if self._crowds else ""

    def leave(self, connection: C) -> None:
        """It is gone; again, or without having been admitted, changes nothing."""
        self.busy(connection)
        network = self._network.pop(connection, None)
        if network is not None:
            self._count[network] -= 1
            if not self._count[network]:
                del self._count[network]
