"""A connection of the HTTP server that does not wait for ever for a client which takes nothing.

Giving the client up breaks the connection: to the app that looks as if the client had hung up.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol. While more is to be sent than its buffer holds, it looks every `send_timeout` seconds whether
    the client has taken some of that since, and breaks the connection when it has not: after twice as long at most.
    """

    def __init__(self, *arguments: Any, send_timeout: float, **more: Any):
        super().__init__(*arguments, **more)
        self.send_timeout = send_timeout
        self._left = 0  # bytes the client had not taken when that was last looked at
        self._look: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        self._stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._left = self._untaken()
        self._look = asyncio.get_running_loop().call_later(self.send_timeout, self._check)

    def _stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _check(self) -> None:
        """Nothing is added while writing is paused: had the client taken anything, less would be left."""
        if self._untaken() < self._left:
            self._wait()
            return
        log.info("a client took nothing of its answer for %g s: its connection is broken off", self.send_timeout)
        self.transport.abort()

    def _untaken(self) -> int:
        """Bytes to be sent, in our buffer and in the system's, which gives room for more only now and then."""
        number = self.transport.get_extra_info("socket").fileno()
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, struct.pack("i", 0)))
        except OSError:  # a system that does not tell: then the client has to take more to be seen to take anything
            queued = 0
        return int(self.transport.get_write_buffer_size()) + int(queued)
