"""What passes through the relay: requests and answers byte for byte and as they come, hang-ups, and broken answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deploy.on_ray.relay import RouterRelay

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'millrace[ray-serve]'")

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SECONDS = 20.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\nx-a: 1\r\nx-a: 2\r\nserver: x\r\nconnection: x-b\r\nx-b: 3\r\n\r\n"


class Listening:
    """Stands in for the router's process: a port, and what a test says there."""

    def __init__(self, handler: Handler):
        self.handler, self.url, self.stopped = handler, "http://127.0.0.1:1", False
        self.heads: list[bytes] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.stopped = True

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            await self.handler(reader, writer)
        finally:
            writer.close()


class Asking:
    """A client of the application: what it says, and what it is told."""

    def __init__(self, relay: RouterRelay, method: str = "GET", path: str = "/v1/models", **scope: Any):
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []} | scope
        self.served = asyncio.create_task(relay(scope, self.says.get, self.told.put))  # type: ignore[arg-type]

    def say(self, body: bytes, more: bool = False) -> None:
        self.says.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def piece(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.told.get(), SECONDS)

    async def whole(self) -> tuple[dict[str, Any], bytes]:
        await asyncio.wait_for(asyncio.shield(self.served), SECONDS)
        start, *bodies = [self.told.get_nowait() for _ in range(self.told.qsize())]
        assert not bodies[-1].get("more_body", False)
        return start, b"".join(body["body"] for body in bodies)


@asynccontextmanager
async def relaying(handler: Handler) -> AsyncIterator[tuple[RouterRelay, Listening]]:
    """The application, begun and ended by its lifespan."""
    process = Listening(handler)
    relay, says, told = RouterRelay(process), asyncio.Queue[Any](), asyncio.Queue[Any]()
    living = asyncio.create_task(relay({"type": "lifespan"}, says.get, told.put))
    says.put_nowait({"type": "lifespan.startup"})
    assert (await asyncio.wait_for(told.get(), SECONDS))["type"] == "lifespan.startup.complete"
    try:
        yield relay, process
    finally:
        says.put_nowait({"type": "lifespan.shutdown"})
        assert (await asyncio.wait_for(told.get(), SECONDS))["type"] == "lifespan.shutdown.complete"
        await living
        assert process.stopped


async def test_a_request_and_its_answer_pass_as_they_are() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + await reader.readexactly(10))

    async with relaying(echo) as (relay, process):
        headers = [(b"host", b"api.example"), (b"content-length", b"10"), (b"X-Api-Key", b"secr\xc3\xa9t")]
        headers += [(b"connection", b"x-own"), (b"x-own", b"1"), (b"expect", b"100-continue")]
        query = b"a=%20b&c"
        asking = Asking(relay, "POST", "/llm/v1/a b/ü", root_path="/llm", query_string=query, headers=headers)
        asking.say(b"01234", more=True)
        asking.say(b"56789")
        start, body = await asking.whole()
    line, *sent = process.heads[0].rstrip().split(b"\r\n")
    assert line == b"POST /v1/a%20b/%C3%BC?a=%20b&c HTTP/1.1"
    assert {one.lower() for one in sent if not one.lower().startswith(b"connection: ")} == {  # its own connection's
        *(b"host: api.example", b"content-length: 10", b"x-api-key: secr\xc3\xa9t")
    }
    assert (start["status"], body) == (200, b"0123456789")
    assert start["headers"] == [(b"content-length", b"10"), (b"x-a", b"1"), (b"x-a", b"2")]


async def test_an_answer_comes_in_pieces_as_it_is_written() -> None:
    go_on = asyncio.Event()

    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"01234")
        await go_on.wait()
        writer.write(b"56789")

    async with relaying(slow) as (relay, _):
        asking = Asking(relay)
        asking.say(b"")
        assert (await asking.piece())["status"] == 200
        assert (await asking.piece())["body"] == b"01234"
        go_on.set()
        assert (await asking.piece())["body"] == b"56789"


async def test_who_hangs_up_is_hung_up_on_there() -> None:
    gone = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"01234")
        assert await reader.read() == b""
        gone.set()

    async with relaying(endless) as (relay, _):
        asking = Asking(relay)
        asking.say(b"")
        await asking.piece()
        asking.says.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(asking.served, SECONDS)
        await asyncio.wait_for(gone.wait(), SECONDS)


async def test_an_answer_before_the_end_of_the_body_is_passed_on() -> None:
    """As that to a body that is too large."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")

    async with relaying(refuse) as (relay, _):
        asking = Asking(relay, "POST", headers=[(b"content-length", b"1000000")])
        asking.say(b"0" * 1000, more=True)
        start, body = await asking.whole()
    assert (start["status"], body) == (413, b"big")


async def test_an_answer_that_breaks_off_is_not_ended_as_a_whole_one() -> None:
    async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"01234")

    async with relaying(break_off) as (relay, _):
        asking = Asking(relay)
        asking.say(b"")
        with pytest.raises(aiohttp.ClientPayloadError):
            await asyncio.wait_for(asking.served, SECONDS)
        last = [asking.told.get_nowait() for _ in range(asking.told.qsize())][-1]
        assert last.get("more_body", True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_without_a_router_there_is_an_error_of_ours(path: str) -> None:
    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with relaying(silent) as (relay, _):
        asking = Asking(relay, "POST", path, headers=[(b"content-length", b"0")])
        asking.say(b"")
        start, body = await asking.whole()
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert "the router is starting or has ended" in json.loads(body)["error"]["message"]


async def answered(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"0123456789")


@pytest.mark.parametrize(
    ("path", "root", "asked"),
    [
        ("@127.0.0.1:1/x", "", b"/@127.0.0.1:1/x"),
        ("/llm@127.0.0.1:1/x", "/llm", b"/llm@127.0.0.1:1/x"),
        ("//127.0.0.1:1/x", "", b"//127.0.0.1:1/x"),
        ("*", "", b"/*"),
        ("/llmore", "/llm", b"/llmore"),
        ("/llm", "/llm", b"/"),
        ("/llm/a", "/llm/", b"/a"),
    ],
)
async def test_no_path_leads_elsewhere_than_to_the_router(path: str, root: str, asked: bytes) -> None:
    async with relaying(answered) as (relay, process):
        asking = Asking(relay, path=path, root_path=root)
        asking.say(b"")
        start, _ = await asking.whole()
    assert start["status"] == 200 and process.heads[0].split(b" ")[1] == asked


async def test_a_body_has_one_length_there() -> None:
    """As its own server has taken it: by chunks, whatever length it was said to have."""

    async def until_its_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readuntil(b"0\r\n\r\n") == b"5\r\nhello\r\n0\r\n\r\n"
        await answered(reader, writer)

    async with relaying(until_its_end) as (relay, process):
        asking = Asking(relay, "POST", headers=[(b"content-length", b"3"), (b"transfer-encoding", b"chunked")])
        asking.say(b"hello")
        assert (await asking.whole())[1] == b"0123456789"
    assert b"content-length" not in process.heads[0]


@pytest.mark.parametrize("told", [[], [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"7.7.7.7")]])
async def test_the_router_is_told_who_asks_whatever_the_client_says_of_itself(told: list[tuple[bytes, bytes]]) -> None:
    async with relaying(answered) as (relay, process):
        asking = Asking(relay, headers=told, client=("192.0.2.1", 5))
        asking.say(b"")
        await asking.whole()
    lines = [line for line in process.heads[0].split(b"\r\n") if line.lower().startswith(b"x-forwarded-for:")]
    assert [line.split(b": ")[1].split(b", ")[-1] for line in lines] == [b"192.0.2.1"]


async def test_who_leaves_while_it_sends_is_no_failure_of_the_router(caplog: pytest.LogCaptureFixture) -> None:
    gone = asyncio.Event()

    async def hear(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"0" * 1000
        gone.set()

    async with relaying(hear) as (relay, _):
        asking = Asking(relay, "POST", headers=[(b"content-length", b"1000000")])
        asking.say(b"0" * 1000, more=True)
        asking.says.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(asking.served, SECONDS)
        await asyncio.wait_for(gone.wait(), SECONDS)
    assert asking.told.empty() and not caplog.records


async def test_an_error_of_ours_has_the_form_of_its_api_under_any_prefix() -> None:
    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with relaying(silent) as (relay, _):
        asking = Asking(relay, path="/llm/v1/messages", root_path="/llm")
        asking.say(b"")
        _, body = await asking.whole()
    assert json.loads(body)["type"] == "error"
