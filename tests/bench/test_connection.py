"""The HTTP client: answers whole whatever the cuts, connections kept, and every failure under its own name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.connection import ClientConnection, HttpClient, Response, TransportError
from tests.fakes.openai_server import ScriptedServer, listening

BODY = b"data: one\n\ndata: two\n\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%s\r\n" % (11, BODY[:11])
    + b"%x\r\n%s\r\n" % (len(BODY) - 11, BODY[11:])
    + b"0\r\n\r\n"
)


class Collected:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""
        self.times: list[float] = []
        self.closed = 0

    def feed(self, data: bytes, now: float) -> None:
        self.data += data
        self.times.append(now)

    def close(self, now: float) -> None:
        self.closed += 1


class SilentTransport(asyncio.Transport):
    """Takes writes and remembers whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    close = abort

    def is_closing(self) -> bool:
        return self.closed


async def answered(pieces: list[bytes], sink: Collected | None, *, then_lost: bool = False) -> Response:
    """What a connection makes of bytes that arrive in `pieces`."""
    connection = ClientConnection(clock=lambda: 1.5)
    connection.connection_made(SilentTransport())
    exchange = asyncio.create_task(connection.exchange(b"", sink, 10.0))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if then_lost:
        connection.connection_lost(None)
    return await exchange


@pytest.mark.parametrize("cut", range(1, len(CHUNKED)))
async def test_a_streamed_answer_may_be_cut_at_any_byte(cut: int) -> None:
    sink = Collected()
    response = await answered([CHUNKED[:cut], CHUNKED[cut:]], sink)
    assert (response.status, sink.data, sink.closed, set(sink.times)) == (200, BODY, 1, {1.5})


async def test_a_streamed_answer_may_come_byte_by_byte() -> None:
    sink = Collected()
    await answered([bytes([byte]) for byte in CHUNKED], sink)
    assert sink.data == BODY


async def test_an_answer_without_length_ends_with_the_connection() -> None:
    sink = Collected()
    response = await answered([b"HTTP/1.1 200 OK\r\n\r\n", BODY], sink, then_lost=True)
    assert (response.status, sink.data, sink.closed) == (200, BODY, 1)


async def test_only_a_200_goes_to_the_sink() -> None:
    sink = Collected()
    response = await answered([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nslow"], sink)
    assert (response.status, response.body, sink.data, sink.closed) == (429, b"slow", b"", 0)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([b"SMTP ready\r\n"], "bad response"),
        ([CHUNKED[:100]], "connection lost"),
        ([], "connection lost"),
    ],
)
async def test_half_an_answer_is_no_answer(pieces: list[bytes], kind: str) -> None:
    sink = Collected()
    with pytest.raises(TransportError) as caught:
        await answered(pieces, sink, then_lost=True)
    assert caught.value.kind == kind
    assert sink.closed == 0


async def test_a_sinks_own_error_is_raised_as_it_is() -> None:
    class Broken(Collected):
        def feed(self, data: bytes, now: float) -> None:
            raise LookupError("a bug")

    with pytest.raises(LookupError, match="a bug"):
        await answered([CHUNKED], Broken())


@asynccontextmanager
async def client_of(url: str, **options: float) -> AsyncIterator[HttpClient]:
    client = HttpClient(url, **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()


async def test_a_connection_is_used_again(server: ScriptedServer) -> None:
    async with client_of(server.url) as client:
        for _ in range(3):
            assert (await client.get("/v1/models")).status == 200
        assert len(client._idle) == 1
    assert [request.headers["host"] for request in server.received] == [server.url.removeprefix("http://")] * 3


@asynccontextmanager
async def rude_server(answers: list[bytes]) -> AsyncIterator[str]:
    """Gives one of `answers` to each request, each on a connection that it closes right after."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))

    async with listening(serve) as url:
        yield url


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    """The answer promises to keep the connection, the server closes it all the same."""
    kept = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with rude_server([kept, kept]) as url, client_of(url) as client:
        assert (await client.get("/")).body == b"ok"
        assert (await client.get("/")).body == b"ok"


async def test_a_new_connection_closed_without_an_answer_is_an_error() -> None:
    async with rude_server([b""]) as url, client_of(url) as client:
        with pytest.raises(TransportError, match="connection lost"):
            await client.get("/")


async def test_an_answer_that_does_not_come_in_time_is_a_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up

    async with asyncio.timeout(60), listening(silent) as url, client_of(url, timeout=0.01) as client:
        with pytest.raises(TransportError, match="timeout"):
            await client.get("/")
        assert client._idle == []


async def test_nobody_listening_is_refused() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can take the port meanwhile
        taken.bind(("127.0.0.1", 0))
        async with client_of(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(TransportError, match="nothing listens") as caught:
                await client.get("/")
    assert caught.value.kind == "refused"


async def test_a_cancelled_exchange_hangs_up(server: ScriptedServer) -> None:
    """The server must see the client leave, and the connection must not be used again."""
    arrived = asyncio.Event()

    async def hang(number: int, chunk: int) -> None:
        arrived.set()
        await asyncio.Event().wait()

    server.script.before_chunk = hang
    async with asyncio.timeout(60), client_of(server.url) as client:
        post = asyncio.create_task(client.post("/v1/completions", b'{"prompt":[1],"max_tokens":1}', Collected()))
        await arrived.wait()
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        assert client._idle == []


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_what_is_not_an_http_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an HTTP address"):
        HttpClient(url)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/under/a/path/v1"])
async def test_an_address_may_end_in_v1(server: ScriptedServer, path: str) -> None:
    async with client_of(server.url + path) as client:
        await client.get("/v1/models")
    root = path.removesuffix("/").removesuffix("/v1")
    assert server.received[-1].path == f"{root}/v1/models"


def test_a_header_cannot_smuggle_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        HttpClient("http://host", headers={"X": "a\r\nY: b"})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "not found"}', "{'detail': 'not found'}"),
        (b"<html>\nlong page", "<html>"),
        (b"", ""),
    ],
)
def test_an_errors_sentence_is_found(body: bytes, message: str) -> None:
    assert Response(status=400, body=body).message() == message
