"""Runs an HTTP app on a socket that is bound before anything slow happens, and stops when the caller says."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import uvicorn

from deploy.runtime.connection_table import ConnectionEnd, ConnectionTable
from deploy.runtime.http_connection import Connection, HttpConnection
from deploy.runtime.tls import HttpsIdentity, https_files
from deploy.runtime.tls_acceptor import TlsAcceptor
from serving.config import HttpConfig
from serving.metrics import ConnectionFigures
from serving.reloaded import ReloadedFiles

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

OTHER_FILES = 256  # descriptors kept for what is no connection: files, workers, pipes
# A peer that has vanished without a word is asked for after a minute, and given up after another.
KEEP_ALIVE_PROBES = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class _Server(uvicorn.Server):
    """Signals belong to the program, not to one of its servers; and it says when it is up."""

    def __init__(self, config: uvicorn.Config, http: HttpConfig, table: ConnectionTable[Connection]):
        super().__init__(config)
        self.up = asyncio.Event()
        self.http = http
        self.table = table
        self.certificates = https_files(http)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.certificates is None:
            await super().startup(sockets)
        else:
            self._startup_tls(sockets or [], self.certificates)
        self.up.set()

    def _startup_tls(self, sockets: list[socket.socket], certificates: ReloadedFiles[HttpsIdentity]) -> None:
        """As uvicorn's, which holds connections in their handshakes without bounds of number and time."""
        make = partial(
            cast("Callable[..., HttpConnection]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        seconds, backlog = self.http.header_timeout, self.config.backlog
        made = [
            TlsAcceptor(
                sock,
                lambda: certificates.current().context,
                make,
                self.table,
                handshake_seconds=seconds,
                backlog=backlog,
            )
            for sock in sockets
        ]
        self.servers = cast("list[asyncio.Server]", made)  # of which it closes them, and waits for that
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket bound to host:port, 0 for a free one. Raises ValueError that names the port's flag if it is not had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections have these from it. An answer's head and body are two writes. asyncio, unlike uvloop, does
    # not set the second option: the body would wait until the head is acknowledged, which takes clients up to 40 ms.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEP_ALIVE_PROBES:
        if hasattr(socket, name):
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error}; choose another --host or {flag}") from None
    return bound


def descriptors_for(connections: int) -> int:
    """Raise the limit of open files for so many connections, as far as it may be; how many there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    room = max(allowed - OTHER_FILES, allowed // 2)
    if room < connections:
        log.warning("%d files may be open: %d connections instead of --max-connections %d", allowed, room, connections)
    return min(room, connections)


class HttpServer:
    """An app on a socket from `bind`, its connections within the bounds of `http`. Raises ValueError for certificates
    that cannot be used.
    """

    def __init__(self, app: FastAPI, listening: socket.socket, http: HttpConfig):
        self.listening = listening
        self.port: int = listening.getsockname()[1]
        room = descriptors_for(http.max_connections)
        self.table: ConnectionTable[Connection] = ConnectionTable(room, http.max_connections_per_address)
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, limits=http, table=self.table)),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config, http, self.table)

    @property
    def certificates(self) -> ReloadedFiles[HttpsIdentity] | None:
        """None for plain HTTP."""
        return self._server.certificates

    def connections(self) -> ConnectionFigures:
        """Connections now, by state, and how many the server has ended, by why."""
        idle = self.table.idle_count
        ended = {end.value: self.table.ended[end] for end in ConnectionEnd}
        return ConnectionFigures(open={"idle": idle, "busy": len(self.table) - idle}, ended=ended)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self.listening]), name=f"http-{self.port}")
        await self._server.up.wait()

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


async def open_status_door(app: FastAPI, http: HttpConfig, port: int, stack: AsyncExitStack) -> None:
    """Serve the app of a process that has no API, until the stack closes."""
    door = HttpServer(app, bind(http.host, port, "--metrics-port"), http)
    await door.start()
    stack.push_async_callback(door.stop)
