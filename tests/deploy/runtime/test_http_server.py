"""Clients that do not read their answers: nothing is held for them for ever, and slow ones are not taken for them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from deploy.runtime.http_connection import HttpConnection
from deploy.runtime.http_server import HttpServer, bind
from serving.config import HttpConfig
from serving.messages import FinishReason
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, CountingObserver, ScriptedGenerate, app_of, tiny_tokenizer

TOKENS = 200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Unread:
    """A stream over a socket with a small buffer, larger than all the buffers on its way together."""

    def __init__(self, tokenizer: Tokenizer, send_timeout: float):
        self.script = ScriptedGenerate(lambda request: [5] * TOKENS)
        self.observer = CountingObserver()
        self.app = app_of(self.script, tokenizer, observer=self.observer)
        listening = bind("127.0.0.1", 0)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what it accepts has that too
        self.server = HttpServer(self.app, listening, HttpConfig(send_timeout=send_timeout))

    async def ask(self) -> None:
        self.client = socket.socket()
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.client, ("127.0.0.1", self.server.port))
        body = json.dumps(
            {"model": MODEL, "prompt": "a", "max_tokens": TOKENS, "stream": True, "n": 4, "logprobs": 5}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: door\r\ncontent-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(self.client, head.encode() + body)

    async def freed(self) -> None:
        """Everything its request held."""
        async with asyncio.timeout(60):
            await self.script.all_closed.wait()
            await self.app.state.in_flight.wait_idle()
        assert self.observer.finished and {reason for reason, _ in self.observer.finished} == {FinishReason.ABORT}


@asynccontextmanager
async def unread(tokenizer: Tokenizer, send_timeout: float) -> AsyncIterator[Unread]:
    made = Unread(tokenizer, send_timeout)
    await made.server.start()
    try:
        await made.ask()
        yield made
    finally:
        made.client.close()
        await made.server.stop()


def test_the_second_of_two_writes_does_not_wait_for_the_first_to_be_acknowledged() -> None:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_client_that_reads_nothing_is_given_up(tokenizer: Tokenizer) -> None:
    async with unread(tokenizer, send_timeout=0.1) as stream:
        await stream.freed()


async def test_a_client_that_reads_slowly_is_not(tokenizer: Tokenizer) -> None:
    """As long as it takes anything between two looks; here they are taken by hand."""
    async with unread(tokenizer, send_timeout=1000.0) as stream:
        connection = await paused(stream.server)
        for _ in range(3):
            left = connection.watch.untaken()
            await read_until_less(stream.client, connection, left)
            connection.watch.check()
            assert not connection.transport.is_closing()
        async with asyncio.timeout(60):
            while not connection.transport.is_closing():  # what is still on its way comes to an end
                await asyncio.sleep(0)
                connection.watch.check()
        await stream.freed()


async def paused(server: HttpServer) -> HttpConnection:
    """The connection, once nothing more fits."""
    async with asyncio.timeout(60):
        while True:
            for connection in server._server.server_state.connections:
                assert isinstance(connection, HttpConnection)
                if connection.flow.write_paused:
                    return connection
            await asyncio.sleep(0.001)


async def read_until_less(client: socket.socket, connection: HttpConnection, left: int) -> None:
    """How much has to be read until the other end is told is the system's affair."""
    async with asyncio.timeout(60):
        while connection.watch.untaken() >= left:
            with suppress(BlockingIOError):
                client.recv(1000)
            await asyncio.sleep(0.001)
