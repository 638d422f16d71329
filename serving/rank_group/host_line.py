"""The connection of two hosts of a group: words in JSON with bytes behind them, and nothing that is executed.

Each wait has a deadline but that for work, which ends with the connection. It does not know what the words mean.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LENGTHS = struct.Struct("<IQ")  # of the word, and of what follows it
MOST_STRANGERS_BYTES = 1 << 14  # of the words of somebody who has not shown yet who they are
MOST_WORD_BYTES = 64 << 20  # placements of many layers
MOST_SECONDS = 24 * 3600.0
TOGETHER = 1 << 16  # bytes that are copied to leave in one piece
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}  # of a peer whose host is gone: 15 s
MOST_SHOWN = 80  # characters of what somebody sends that a log has
MOST_TOLD = 256  # things that are not said again


class HostGone(Exception):
    """The other host does not take part any more, or not in time; the text says what was seen of that."""


@dataclass(frozen=True, slots=True)
class HostWord:
    """`facts` are what JSON holds, whoever sent them; `size` bytes follow, to be taken with `bytes_into`."""

    kind: str
    facts: Mapping[str, Any]
    size: int

    def number(self, name: str, most: int) -> int:
        """A count from 0 to `most`. Raises HostGone for anything else."""
        found = self.facts.get(name)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
            raise HostGone(f"it sends {name} {shown(found)}, which is no number from 0 to {most}")
        return found

    def seconds(self, name: str) -> float:
        """Raises HostGone for what is none, or longer than a day."""
        found = self.facts.get(name)
        if not isinstance(found, int | float) or not 0 < found <= MOST_SECONDS:
            raise HostGone(f"it sends {name} {shown(found)}, which are no seconds of a wait")
        return float(found)

    def lists(self, name: str, most: int) -> list[list[int]]:
        """Lists of counts from 0 to `most`, none of them empty. Raises HostGone for anything else."""
        found = self.facts.get(name)
        if not isinstance(found, list) or not all(isinstance(each, list) and each for each in found):
            raise HostGone(f"it sends {name} that are no lists of numbers")
        numbers = (number for each in found for number in each)
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= most for n in numbers):
            raise HostGone(f"it sends {name} that are not all numbers from 0 to {most}")
        return found

    def text(self, name: str) -> str:
        """Raises HostGone for what is no text."""
        found = self.facts.get(name)
        if not isinstance(found, str):
            raise HostGone(f"it sends {name} {shown(found)}, which is no text")
        return found


class HostLine:
    """One end; one thread uses it at a time. `sent` and `received` are bytes so far, TLS's own not counted."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.sent = self.received = 0
        self.trusted = False  # once the other has shown who they are
        self.where = peer_of(connection)

    def send(self, kind: str, facts: Mapping[str, Any], seconds: float, parts: Sequence[memoryview] = ()) -> None:
        """`parts` are bytes. Raises HostGone."""
        word = json.dumps({"kind": kind, **facts}, separators=(",", ":")).encode()
        size = sum(map(len, parts))
        head = _LENGTHS.pack(len(word), size) + word
        pieces = [memoryview(b"".join((head, *parts)))] if size <= TOGETHER else [memoryview(head), *parts]
        until = time.monotonic() + seconds
        try:
            for piece in pieces:
                self.connection.settimeout(max(1e-3, until - time.monotonic()))
                self.connection.sendall(piece)
                self.sent += len(piece)
        except TimeoutError as error:
            raise HostGone(f"{self.where} has taken nothing for {seconds:g} s") from error
        except OSError as error:
            raise HostGone(f"the connection to {self.where} has ended: {_told(error)}") from error

    def hear(self, seconds: float) -> HostWord:
        """The next word. Raises HostGone."""
        until = time.monotonic() + seconds
        head = bytearray(_LENGTHS.size)
        self._fill(memoryview(head), until, seconds)
        length, size = _LENGTHS.unpack(head)
        if length > (MOST_WORD_BYTES if self.trusted else MOST_STRANGERS_BYTES) or (size and not self.trusted):
            raise HostGone(f"{self.where} sends what is no word of a host of ranks")
        word = bytearray(length)
        self._fill(memoryview(word), until, seconds)
        try:
            facts = json.loads(word)
        except (ValueError, RecursionError) as error:
            raise HostGone(f"{self.where} sends what is no word of a host of ranks") from error
        if not isinstance(facts, dict) or not isinstance(facts.get("kind"), str):
            raise HostGone(f"{self.where} sends what is no word of a host of ranks")
        return HostWord(facts["kind"], facts, size)

    def answer(self, kind: str, seconds: float) -> HostWord:
        """The next word, of this kind. Raises HostGone, with what the other says of its end."""
        word = self.hear(seconds)
        if word.kind == "lost":
            reason = word.text("reason")
            raise HostGone(f"{self.where}: {reason if self.trusted else shown(reason)}")
        if word.kind != kind:
            raise HostGone(f"{self.where} says {shown(word.kind)} where {kind!r} is awaited")
        return word

    def bytes_into(self, word: HostWord, memory: memoryview, seconds: float) -> None:
        """What follows a word. Raises HostGone, also where it is of another size."""
        if word.size != len(memory):
            raise HostGone(f"{self.where} sends {word.size} bytes where {len(memory)} are awaited")
        self._fill(memory, time.monotonic() + seconds, seconds)

    def _fill(self, memory: memoryview, until: float, seconds: float) -> None:
        got = 0
        while got < len(memory):
            left = until - time.monotonic()
            if left <= 0:
                raise HostGone(f"{self.where} has not answered within {seconds:g} s")
            self.connection.settimeout(left)
            try:
                count = self.connection.recv_into(memory[got:])
            except TimeoutError as error:
                raise HostGone(f"{self.where} has not answered within {seconds:g} s") from error
            except OSError as error:
                raise HostGone(f"the connection to {self.where} has ended: {_told(error)}") from error
            if not count:
                raise HostGone(f"{self.where} has closed the connection")
            got += count
        self.received += got

    def ready(self, others: Sequence[int]) -> bool:
        """Wait until there is something to hear here, and say so; else one of the `others`, descriptors, is ready."""
        if isinstance(self.connection, ssl.SSLSocket) and self.connection.pending():
            return True
        poller = select.poll()
        for descriptor in (self.connection.fileno(), *others):
            poller.register(descriptor, select.POLLIN)
        found = {descriptor for descriptor, _ in poller.poll()}
        return self.connection.fileno() in found and found.isdisjoint(others)

    def close(self) -> None:
        self.connection.close()


def settle(connection: socket.socket) -> None:
    """Have words leave at once, and the end be found out about where the other's host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def peer_of(connection: socket.socket) -> str:
    """Where the other end is, as HOST:PORT or [HOST]:PORT."""
    try:
        host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return "the other host"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown(found: object) -> str:
    """What somebody sends, as a log may have it."""
    return f"{found!r:.{MOST_SHOWN}}" if isinstance(found, str | int | float | None) else type(found).__name__


class ToldOnce:
    """What a log has of those who come again and again: each thing once, of the last MOST_TOLD. For any threads."""

    def __init__(self) -> None:
        self._told: dict[Hashable, None] = {}
        self._lock = threading.Lock()

    def is_new(self, what: Hashable) -> bool:
        """From now on it is not."""
        with self._lock:
            if what in self._told:
                return False
            if len(self._told) == MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._told[what] = None
            return True


def _told(error: OSError) -> str:
    return str(error.strerror or error)
