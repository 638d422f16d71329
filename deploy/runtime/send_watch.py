"""Watches whether a client takes anything of what is being sent to it; it knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable


class SendWatch:
    """While started, looks every `timeout` seconds whether the client has taken some of what waits for it, and calls
    `give_up` when it has not: after twice as long at most. Nothing may be written meanwhile.
    """

    def __init__(self, transport: asyncio.Transport, timeout: float, give_up: Callable[[], None]):
        self._transport = transport
        self._timeout = timeout
        self._give_up = give_up
        self._left = 0  # bytes the client had not taken when that was last looked at
        self._look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        self._left = self.untaken()
        self._look = asyncio.get_running_loop().call_later(self._timeout, self.check)

    def closing(self) -> None:
        """The transport closes as soon as what was written is sent: without this, never for a client that reads
        nothing.
        """
        if self._look is None and self._transport.get_write_buffer_size():
            self.start()

    def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def end(self) -> None:
        """The connection is gone. Nothing refers to it from here any more, so that it is freed at once."""
        self.stop()
        self._give_up = _nothing

    def check(self) -> None:
        """Had the client taken anything, less would be left."""
        if self.untaken() < self._left:
            self.start()
        else:
            self._give_up()

    def untaken(self) -> int:
        """Bytes to be sent, in our buffer and in the system's, which gives room for more only now and then."""
        number = self._transport.get_extra_info("socket").fileno()
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, struct.pack("i", 0)))
        except OSError:  # a system that does not tell: then the client has to take more to be seen to take anything
            queued = 0
        return int(self._transport.get_write_buffer_size()) + int(queued)


def _nothing() -> None:
    """Of a connection that is gone there is nothing to give up."""
