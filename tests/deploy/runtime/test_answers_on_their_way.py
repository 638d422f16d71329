"""Answers that are written and not taken yet: nobody else's coming cuts them off, and none keeps a place for ever."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deploy.runtime.http_connection import HttpConnection
from deploy.runtime.http_server import HttpServer, bind
from serving.config import HttpConfig
from tests.deploy.runtime.test_tls import certificate, trusting

Run = Callable[[Coroutine[Any, Any, None]], None]
BOTH = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
FIRST, LAST = 65_000, 15_000  # bytes of an answer: about what a connection's buffer holds, and less than is left in it
ASK = b"GET /answer HTTP/1.1\r\nhost: door\r\n\r\n"
ASK_AND_CLOSE = ASK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


class Pieces(Response):
    """Two writes, after the second of which more waits than fits the buffer, where nobody reads."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", str(FIRST + LAST).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"x" * FIRST, "more_body": True})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"x" * LAST, "more_body": False})


def answering() -> FastAPI:
    app = FastAPI()

    @app.get("/answer")
    async def answer() -> Response:
        return Pieces()

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * LAST
        raise RuntimeError("a mistake in the middle of an answer")

    @app.get("/broken")
    async def breaks() -> StreamingResponse:
        return StreamingResponse(broken())

    @app.get("/short")
    async def short() -> str:
        return ""

    return app


@asynccontextmanager
async def served(**config: Any) -> AsyncIterator[HttpServer]:
    """A server whose connections have small buffers in the system."""
    listening = bind("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = HttpServer(answering(), listening, HttpConfig(**config))
    await server.start()
    try:
        async with asyncio.timeout(60):
            yield server
    finally:
        await server.stop()


async def connected(server: HttpServer) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
    return client


async def written_to(server: HttpServer, client: socket.socket, asked: bytes) -> HttpConnection:
    """The client's connection, once the whole answer is written and more of it waits than fits the buffer."""
    await asyncio.get_running_loop().sock_sendall(client, asked)
    await until(lambda: any(one.flow.write_paused and one._running is None for one in connections(server)))
    return next(one for one in connections(server) if one.flow.write_paused)


def connections(server: HttpServer) -> list[HttpConnection]:
    return [one for one in server._server.server_state.connections if isinstance(one, HttpConnection)]


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def taken(client: socket.socket, enough: Callable[[bytes], bool]) -> bytes:
    """What the client has read, once that is enough or the server has closed."""
    got, loop = b"", asyncio.get_running_loop()
    while not enough(got):
        piece = await loop.sock_recv(client, 500)
        if not piece:
            break
        got += piece
        await asyncio.sleep(0)
    return got


def whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ") and len(body) == FIRST + LAST


@BOTH
def test_the_last_of_an_answer_is_not_waited_for_without_end(run: Run) -> None:
    """Before: once a client had taken so much that the rest fitted the buffer, nobody looked any more whether it took
    that, and a connection that was to close stayed.
    """

    async def scenario() -> None:
        async with served(send_timeout=0.5) as server:
            client = await connected(server)
            connection = await written_to(server, client, ASK_AND_CLOSE)
            await taken(client, lambda _: not connection.flow.write_paused)
            assert connection.transport.is_closing()
            await until(lambda: not server.table)
            client.close()

    run(scenario())


@BOTH
def test_an_answer_that_breaks_off_is_not_waited_for_without_end(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Before: nobody looked whether the client took what had been written of it."""

    async def scenario() -> None:
        async with served(send_timeout=0.5) as server:
            client = await connected(server)
            await asyncio.get_running_loop().sock_sendall(client, ASK.replace(b"/answer", b"/broken"))
            await until(lambda: any(one.transport.is_closing() for one in connections(server)))
            assert len(server.table) == server.table.idle_count == 1
            await until(lambda: not server.table)
            client.close()

    with caplog.at_level(logging.CRITICAL, "uvicorn.error"):
        run(scenario())


@BOTH
def test_an_answer_that_is_being_taken_makes_no_room(run: Run) -> None:
    """Before: it was idle as soon as it was written, and who came next cut it off."""

    async def scenario() -> None:
        async with served(max_connections=1) as server:
            client = await connected(server)
            await written_to(server, client, ASK)
            other = await connected(server)
            assert b" 503 " in await taken(other, lambda _: False)
            assert whole(await taken(client, whole))
            await until(lambda: server.table.idle_count == 1)
            later = await connected(server)
            assert whole(await ask(later, ASK))
            for one in (client, other, later):
                one.close()

    async def ask(client: socket.socket, asked: bytes) -> bytes:
        await asyncio.get_running_loop().sock_sendall(client, asked)
        return await taken(client, whole)

    run(scenario())


@BOTH
def test_the_time_of_a_kept_connection_begins_when_the_answer_is_taken(run: Run) -> None:
    """Before: it began when that was written, and over TLS what was not taken soon after it was lost."""

    async def scenario() -> None:
        async with served(keep_alive_timeout=0.3) as server:
            client = await connected(server)
            await written_to(server, client, ASK)
            await asyncio.sleep(0.7)
            assert whole(await taken(client, whole))
            await asyncio.get_running_loop().sock_sendall(client, ASK)
            assert whole(await taken(client, whole))
            client.close()

    run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
@BOTH
def test_a_client_that_does_not_end_tls_keeps_no_place(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before: an answered connection that waited for the client's end of TLS was busy for half a minute, so that four
    addresses without a key were enough to have everybody else refused.
    """
    cert, key = certificate(tmp_path_factory.mktemp("tls"), "server")

    async def scenario() -> None:
        async with served(ssl_certfile=cert, ssl_keyfile=key, max_connections=1) as server:
            stays = [await silent_after(server, ssl_client(cert)) for _ in range(3)]
            assert len(server.table) == server.table.idle_count == 1
            for one in stays:
                one.close()

    run(scenario())


def ssl_client(cert: str) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    return trusting(cert).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1"), incoming, outgoing


async def silent_after(server: HttpServer, client: tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]) -> socket.socket:
    """A client that has had its answer over TLS, was told that the connection closes, and says nothing to that."""
    tls, incoming, outgoing = client
    plain, loop = await connected(server), asyncio.get_running_loop()

    async def turns(step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(plain, outgoing.read())
                incoming.write(await loop.sock_recv(plain, 65536))

    await turns(tls.do_handshake)
    tls.write(ASK_AND_CLOSE.replace(b"/answer", b"/short"))
    assert b" 200 " in await turns(lambda: tls.read(4096))
    await asyncio.sleep(0.05)
    return plain
