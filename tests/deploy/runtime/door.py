"""A server of the test's own loop whose texts wait, and raw clients of it; nothing is held once it is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from deploy.runtime.http_server import HttpServer, bind
from serving.config import HttpConfig
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import MODEL, CountingObserver, ScriptedGenerate, app_of
from tests.fakes.loop_time import passing_time

GET = b"GET /live HTTP/1.1\r\nhost: door\r\n\r\n"
HEAD = b"GET /live HTTP/1.1\r\nhost: door\r\n"
LIMIT = 4096


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: door\r\ntransfer-encoding: chunked\r\n\r\n"
    + f'{len(b"""{"model":"tiny","prompt":"a"}"""):x}\r\n'.encode()
    + b'{"model":"tiny","prompt":"a"}\r\n'
)


def post(*, stream: bool = False, tokens: int = 4, more: bytes = b"") -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": tokens, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: door\r\ncontent-length: {len(body)}\r\n".encode()
    return head + more + b"\r\n" + body


class Client:
    """One connection, read in answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        """Each part in a packet of its own, more or less."""
        for part in parts:
            self.writer.write(part)
            with suppress(ConnectionError):
                await self.writer.drain()
            await asyncio.sleep(0.005)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.readuntil(b"0\r\n\r\n")
        return int(head[0].split()[1]), headers, body

    async def ended(self) -> bytes:
        """What still came before the server closed."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


class Door:
    """A server whose texts wait for `go`, and clients of it."""

    def __init__(self, tokenizer: Tokenizer, **config: Any):
        self.go = asyncio.Event()
        self.script = ScriptedGenerate(lambda request: [5] * 50, before=lambda request, i: self.go.wait())
        self.observer = CountingObserver()
        key = config.get("api_key")
        self.app = app_of(self.script, tokenizer, observer=self.observer, **({"api_key": key} if key else {}))
        limits = {"max_header_size": LIMIT, "header_timeout": 5.0, **config}
        self.server = HttpServer(self.app, bind("127.0.0.1", 0), HttpConfig(**limits))
        self.clients: list[Client] = []
        self.limit = asyncio.timeout(60)  # of the whole test
        self._let_pass: Callable[[float], None] | None = None

    def let_pass(self, seconds: float) -> None:
        """So many seconds pass for the server, and none of the test's own limit."""
        if self._let_pass is None:
            self._let_pass = passing_time()
        when = self.limit.when()
        assert when is not None
        self.limit.reschedule(when + seconds)
        self._let_pass(seconds)

    async def client(self, source: str = "127.0.0.1") -> Client:
        made = Client(*await asyncio.open_connection("127.0.0.1", self.server.port, local_addr=(source, 0)))
        self.clients.append(made)
        return made

    def ends(self) -> dict[str, int]:
        return {end.value: count for end, count in self.server.table.ended.items() if count}

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def door(tokenizer: Tokenizer, **config: Any) -> AsyncIterator[Door]:
    """Nothing is held at the end."""
    made = Door(tokenizer, **config)
    await made.server.start()
    try:
        async with made.limit:
            yield made
            for client in made.clients:
                client.writer.close()
            await made.until(lambda: not made.server.table and not made.server._server.server_state.connections)
            made.go.set()
            await made.app.state.in_flight.wait_idle()
    finally:
        await made.server.stop()
