"""Accepts TLS connections within the bounds of the connection table: one whose handshake is under way counts as well.

An event loop's own server tells of a connection once its handshake is over; until then any number could be held.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from deploy.runtime.connection_table import ConnectionTable
from deploy.runtime.http_connection import Connection, HttpConnection
from serving.addresses import network_of

log = logging.getLogger(__name__)

PAUSE_S = 1.0  # where the host has no room for another connection
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Handshake:
    """A connection from its arrival to the end of its handshake, which may take so many seconds.

    The HttpConnection that `make` gives takes its place in the table.
    """

    def __init__(
        self,
        accepted: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], HttpConnection],
        table: ConnectionTable[Connection],
        seconds: float,
    ):
        self._accepted = accepted
        self._context = context
        self._make = make
        self._table = table
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._taken = False  # by a transport, which closes it

    def begin(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(), name="tls-handshake")
        self._task.add_done_callback(self._end)
        return self._task

    def _end(self, _: asyncio.Task[None]) -> None:
        """However it ended: before it has begun, too."""
        self._task = None
        self._table.leave(self)
        if not self._taken:
            self._accepted.close()

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # whatever is wrong with a handshake, its client is told by TLS or hears nothing
            await loop.connect_accepted_socket(
                self._protocol, self._accepted, ssl=self._context, ssl_handshake_timeout=self._seconds
            )

    def _protocol(self) -> HttpConnection:
        self._taken = True
        made = self._make()
        made.before = self
        return made


class TlsAcceptor:
    """Listens on a bound socket; what uvicorn asks of a server is `close` and `wait_closed`.

    `context` is asked at every connection: certificates may have changed.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: Callable[[], ssl.SSLContext],
        make: Callable[[], HttpConnection],
        table: ConnectionTable[Connection],
        *,
        handshake_seconds: float,
        backlog: int,
    ):
        self._listening = listening
        self._context = context
        self._make = make
        self._table = table
        self._seconds = handshake_seconds
        self._handshakes: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        listening.listen(backlog)
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._accepting = asyncio.create_task(self._accept(), name="tls-accept")
        self._accepting.add_done_callback(self._end)

    def _end(self, accepting: asyncio.Task[None]) -> None:
        """Only closing ends it on purpose."""
        if not self._closed and not accepting.cancelled():
            log.error("the task that accepts connections broke, and begins anew", exc_info=accepting.exception())
            self._begin()

    def close(self) -> None:
        self._closed = True
        self._accepting.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except OSError as error:  # else the client has left already
                if error.errno in _NO_ROOM:
                    log.error("no connection can be accepted: %s", error)
                    await asyncio.sleep(PAUSE_S)
                continue
            self._admit(accepted, network_of(address[0]))
            await asyncio.sleep(0)  # one after the other: where more wait, asyncio gives the next one at once

    def _admit(self, accepted: socket.socket, network: str) -> None:
        handshake = Handshake(accepted, self._context(), self._make, self._table, self._seconds)
        admission = self._table.admit(handshake, network)
        if admission.evicted is not None:
            admission.evicted.abort()
        if admission.refused is not None:
            accepted.close()
            return
        task = handshake.begin()
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
