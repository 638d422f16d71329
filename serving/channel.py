"""What two processes of ours say to each other: pickled words over a socket that only the two of them have.

Each wait has a deadline but that for work, which ends with the other's process. It does not know what the words mean.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<Q")


class ChannelClosed(Exception):
    """The other end has left."""


class ChannelLate(Exception):
    """The other end has not answered, or not listened, within the deadline."""


class Channel:
    """One end. A word that a deadline cut off while it was sent leaves the channel of no use.

    One that it cut off while it was received is received further by the next call: its sender may be late, not lost.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._word: bytearray | None = None  # which has begun to come; None before its length is known
        self._length, self._got = bytearray(_LENGTH.size), 0  # bytes of what comes at present

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Our end, and the other as a socket that a child may inherit."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def send(self, word: Any, seconds: float) -> None:
        """Raises ChannelClosed, ChannelLate."""
        frame = pickle.dumps(word, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except TimeoutError as error:
            raise ChannelLate from error
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, seconds: float | None) -> Any:
        """The next word; with None it waits until there is one. Raises ChannelClosed, ChannelLate."""
        until = None if seconds is None else time.monotonic() + seconds
        if self._word is None:
            self._fill(self._length, until)
            self._word = bytearray(*_LENGTH.unpack(self._length))
        self._fill(self._word, until)
        word, self._word = self._word, None
        return pickle.loads(word)  # noqa: S301 - from our parent, or our own child

    def _fill(self, found: bytearray, until: float | None) -> None:
        view = memoryview(found)
        while self._got < len(found):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise ChannelLate
            self._socket.settimeout(left)
            try:
                count = self._socket.recv_into(view[self._got :])
            except TimeoutError as error:
                raise ChannelLate from error
            except OSError as error:
                raise ChannelClosed from error
            if not count:
                raise ChannelClosed
            self._got += count
        self._got = 0

    def fileno(self) -> int:
        """For whoever waits for several at once."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
