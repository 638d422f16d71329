"""Runs an HTTP app on a socket that is bound before anything slow happens, and stops when the caller says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI

from deploy.runtime.http_connection import HttpConnection
from serving.config import HttpConfig


class _Server(uvicorn.Server):
    """Signals belong to the program, not to one of its servers; and it says when it is up."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host:port, 0 for a free one. Raises ValueError saying what to do when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    return bound


class HttpServer:
    """An app on a socket from `bind`. `send_timeout`: seconds for which a client may take nothing of its answer."""

    def __init__(self, app: FastAPI, listening: socket.socket, *, send_timeout: float):
        self.listening = listening
        self.port: int = listening.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, send_timeout=send_timeout)),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self.listening]), name=f"http-{self.port}")
        await self._server.up.wait()

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


async def open_status_door(app: FastAPI, http: HttpConfig, port: int, stack: AsyncExitStack) -> None:
    """Serve the app of a process that has no API, until the stack closes."""
    door = HttpServer(app, bind(http.host, port), send_timeout=http.send_timeout)
    await door.start()
    stack.push_async_callback(door.stop)
