"""A small HTTP/1.1 client on bare asyncio: keep-alive, streamed bodies, one clock reading for each arrival of bytes.

It exists because the client shares its cores with the server under test; it knows nothing of completions.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import orjson

from bench.sse import error_message

CONNECT_TIMEOUT_S = 10.0
MAX_BUFFERED_BODY = 1 << 24  # bytes of a response that is not streamed


class TransportError(Exception):
    """The exchange failed below HTTP; `kind` is a short word to count by, `detail` what the system said."""

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Status and body of an answer; the body is empty when it was streamed to a sink."""

    status: int
    body: bytes

    def message(self) -> str:
        """What the body says about an error: OpenAI's sentence, or the first line of whatever it is."""
        try:
            parsed = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return self.body[:200].decode("utf-8", "replace").strip().partition("\n")[0]
        return error_message(parsed) if isinstance(parsed, dict) else str(parsed)


class BodySink(Protocol):
    """Takes the body of a streamed answer; `now` is seconds on the client's clock."""

    def feed(self, data: bytes, now: float) -> None: ...

    def close(self, now: float) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One connection with at most one exchange on it at a time."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._sink: BodySink | None = None
        self._streaming = False
        self._framed = False  # the end of the body is told by a length or by chunks
        self._body: list[bytes] = []
        self._status = 0
        self._now = 0.0
        self.answered = False  # any byte of the answer has come

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def exchange(self, request: bytes, sink: BodySink | None, limit_s: float) -> Response:
        """Writes the request and waits for the whole answer; a 200 streams to `sink`.

        Raises TransportError, also after `limit_s` seconds; a cancelled or failed exchange closes the connection.
        """
        assert self._answer is None, "one exchange at a time"
        if self._transport is None:
            raise TransportError("connection lost", "the server closed the connection as soon as it was made")
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._sink, self._streaming, self._framed, self.answered = sink, False, False, False
        self._body.clear()
        timer = loop.call_later(limit_s, self._fail, "timeout", f"no complete answer within {limit_s:g} s")
        try:
            self._transport.write(request)
            return await self._answer
        except BaseException:
            self.abort()
            raise
        finally:
            timer.cancel()
            self._answer = self._sink = None

    def abort(self) -> None:
        """Closes at once: the server sees the client leave."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if self._answer is not None and error.__context__ is not None:
                self._answer.set_exception(error.__context__)  # our own bug in a sink: let the caller see it
        except httptools.HttpParserError as error:
            self._fail("bad response", f"not HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._status and not self._framed:
            self._now = self._clock()
            self._complete()  # a body without length or chunks ends with the connection
        else:
            where = "in the middle of the answer" if self.answered else "before an answer"
            self._fail("connection lost", f"the server closed the connection {where}")

    # the parser's side

    def on_message_begin(self) -> None:
        self._status = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._streaming = self._sink is not None and self._status == 200

    def on_body(self, body: bytes) -> None:
        if self._streaming and self._sink is not None:
            self._sink.feed(body, self._now)
        elif sum(map(len, self._body)) < MAX_BUFFERED_BODY:
            self._body.append(body)

    def on_message_complete(self) -> None:
        keep = self._parser.should_keep_alive()
        self._complete()
        if not keep and self._transport is not None:
            self._transport.close()

    def _complete(self) -> None:
        if self._streaming and self._sink is not None:
            self._sink.close(self._now)
        status, self._status = self._status, 0
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Response(status=status, body=b"".join(self._body)))

    def _fail(self, kind: str, detail: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TransportError(kind, detail))


class HttpClient:
    """Requests to one server over as many kept connections as are needed at once."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`url` is the server's root, with or without a trailing `/v1`; raises ValueError when it is not HTTP."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("no HTTP host")
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ValueError(f"`{url}` is not an HTTP address ({error}); write it as http://HOST:PORT") from error
        place = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{place}"
        self.clock = clock
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        fields = {"Host": place, "Content-Type": "application/json", **(headers or {})}
        if any("\r" in text or "\n" in text for text in (*fields, *fields.values())):
            raise ValueError("a header holds a line break")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[ClientConnection] = []

    async def get(self, path: str) -> Response:
        """GET; raises TransportError."""
        return await self._exchange(self._head("GET", path, 0), None)

    async def post(self, path: str, body: bytes, sink: BodySink | None = None) -> Response:
        """POST of JSON; a 200's body goes to `sink` as it comes, when there is one. Raises TransportError."""
        return await self._exchange(self._head("POST", path, len(body)) + body, sink)

    async def close(self) -> None:
        """Closes every idle connection."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports run their closing callbacks

    def _head(self, method: str, path: str, length: int) -> bytes:
        return f"{method} {self._root}{path} HTTP/1.1\r\n{self._fields}Content-Length: {length}\r\n\r\n".encode()

    async def _exchange(self, request: bytes, sink: BodySink | None) -> Response:
        while connection := self._take_idle():
            try:
                return await self._exchange_on(connection, request, sink)
            except TransportError as error:
                # A kept connection may have been closed by the server just as we wrote; RFC 9112, 9.3.1.
                if connection.answered or error.kind != "connection lost":
                    raise
        return await self._exchange_on(await self._connect(), request, sink)

    async def _exchange_on(self, connection: ClientConnection, request: bytes, sink: BodySink | None) -> Response:
        response = await connection.exchange(request, sink, self._timeout)
        if connection.usable:
            self._idle.append(connection)
        return response

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(self.clock), self._host, self._port, ssl=self._tls
                )
        except ConnectionRefusedError as error:
            raise TransportError("refused", f"nothing listens at {self.url}") from error
        except TimeoutError as error:
            raise TransportError("unreachable", f"no connection to {self.url} in {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise TransportError("unreachable", f"{self.url}: {error.strerror or error}") from error
        return connection
