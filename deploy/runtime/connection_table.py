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
    EVICTED = "evicted"  # idle for longest when another one came
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

    Where one is too many, the one that has been idle for longest goes: of the same network where that has too many.
    """

    def __init__(self, most: int, most_of_address: int):
        self.most = most
        self.most_of_address = most_of_address
        self.ended: Counter[ConnectionEnd] = Counter()
        self._network: dict[C, str] = {}
        self._count: Counter[str] = Counter()
        self._idle: OrderedDict[C, None] = OrderedDict()
        self._idle_of: dict[str, OrderedDict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._network)

    def of(self, network: str) -> int:
        """Connections of one network."""
        return self._count[network]

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    def admit(self, connection: C, network: str) -> Admission[C]:
        """Take a connection in, as an idle one, unless it is refused. One that is evicted has left."""
        evicted: C | None = None
        if self.most_of_address and self._count[network] >= self.most_of_address:
            evicted = next(iter(self._idle_of.get(network, ())), None)
            full: ConnectionEnd | None = ConnectionEnd.ADDRESS
        elif self.most and len(self) >= self.most:
            evicted = next(iter(self._idle), None)
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
        if network is not None and connection not in self._idle:
            self._idle[connection] = None
            self._idle_of.setdefault(network, OrderedDict())[connection] = None

    def busy(self, connection: C) -> None:
        """A request of it is being answered: it is not evicted."""
        if connection in self._idle:
            network = self._network[connection]
            del self._idle[connection]
            del self._idle_of[network][connection]
            if not self._idle_of[network]:
                del self._idle_of[network]

    def leave(self, connection: C) -> None:
        """It is gone; again, or without having been admitted, changes nothing."""
        self.busy(connection)
        network = self._network.pop(connection, None)
        if network is not None:
            self._count[network] -= 1
            if not self._count[network]:
                del self._count[network]
