"""Bounds of a connection: what is too much gets its status and an end, what others or earlier requests get stays."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections import Counter

import pytest

from deploy.runtime.connection_table import ConnectionEnd
from deploy.runtime.http_connection import MANY_PIECES, HttpConnection
from serving.text.tokenizer import Tokenizer
from tests.deploy.runtime.door import CHUNKED, GET, HEAD, LIMIT, Client, Door, door, post
from tests.fakes.generate import KEY, MODEL, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("sent", "status", "end"),
    [
        pytest.param([HEAD + b"x: " + b"y" * LIMIT + b"\r\n\r\n"], 431, "header_size", id="one long header"),
        pytest.param([HEAD, b"x: " + b"y" * 40_000], 431, "header_size", id="a header without end"),
        pytest.param([HEAD, *[b"x: " + b"y" * 1000] * 9], 431, "header_size", id="a header without end, in parts"),
        pytest.param([b"GET /" + b"y" * 40_000], 431, "header_size", id="a target without end"),
        pytest.param([b"x" * 40_000], 400, "malformed", id="a method without end"),
        pytest.param([HEAD + b"a: b\r\n" * 100 + b"\r\n"], 431, "header_count", id="many headers"),
        pytest.param([HEAD + b"a: b\r\n" * 200], 431, "header_count", id="headers without end"),
        pytest.param([HEAD + b"transfer-encoding: banana\r\n\r\n"], 400, "malformed", id="an unknown framing"),
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"], 400, "malformed", id="TLS"),
        pytest.param([post()[:-30], b"x" * 10], None, None, id="half a body is waited for"),
        pytest.param([HEAD + b"a: b\r\n" * 99 + b"\r\n"], 200, None, id="as many headers as there may be"),
    ],
)
async def test_headers_are_bounded(
    tokenizer: Tokenizer, sent: list[bytes], status: int | None, end: str | None
) -> None:
    async with door(tokenizer) as made:
        client = await made.client()
        await client.send(*sent)
        if status is not None:
            found, headers, body = await client.answer()
            assert found == status
            if end is not None:
                assert headers["connection"] == "close"
                assert json.loads(body)["error"]["code"] == end
                assert await client.ended() == b""
        assert made.ends() == ({end: 1} if end else {})


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param([b"0\r\nx: " + b"y" * 40_000] * 2, id="a trailer without end"),
        pytest.param([b"0\r\n" + b"x: y\r\n" * 200], id="many trailers"),
        pytest.param([b"1;" + b"x" * 40_000, b"x" * 40_000], id="a chunk extension without end"),
    ],
)
async def test_what_is_no_body_is_bounded_within_one(tokenizer: Tokenizer, tail: list[bytes]) -> None:
    async with door(tokenizer) as made:
        client = await made.client()
        await client.send(CHUNKED, *tail)
        assert (await client.answer())[0] == 431
        assert made.script.started == []


async def test_a_body_in_small_pieces_is_refused_before_it_costs_much(tokenizer: Tokenizer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: door\r\ntransfer-encoding: chunked\r\n\r\n"
    async with door(tokenizer) as made:
        made.go.set()
        small, fair = await made.client(), await made.client()
        await small.send(head + b"1\r\nx\r\n" * (MANY_PIECES + 1))
        assert (await small.answer())[0] == 400
        text = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode().ljust(2 * MANY_PIECES * 64)
        pieces = [b"40\r\n" + text[at : at + 64] + b"\r\n" for at in range(0, len(text), 64)]
        await fair.send(head + b"".join(pieces) + b"0\r\n\r\n")
        assert (await fair.answer())[0] == 200
        assert made.ends() == {"body_pieces": 1}


async def test_trailers_are_no_headers(tokenizer: Tokenizer) -> None:
    async with door(tokenizer, api_key=KEY) as made:
        made.go.set()
        client = await made.client()
        await client.send(CHUNKED + f"0\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
        assert (await client.answer())[0] == 401


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the server has read something, by the client's port."""
    times, read = Counter[int](), HttpConnection.data_received

    def counted(connection: HttpConnection, data: bytes) -> None:
        assert connection.client is not None
        read(connection, data)
        times[connection.client[1]] += 1

    monkeypatch.setattr(HttpConnection, "data_received", counted)
    return times


async def sent(made: Door, heard: Counter[int], client: Client, drop: bytes) -> None:
    """And read by the server."""
    port = client.writer.get_extra_info("sockname")[1]
    before = heard[port]
    await client.send(drop)
    await made.until(lambda: heard[port] > before)


async def test_headers_that_do_not_end_in_time(tokenizer: Tokenizer, heard: Counter[int]) -> None:
    """Neither silence nor drops put the end off; whoever began gets a 408."""
    async with door(tokenizer, header_timeout=1000.0) as made:
        silent, slow, empty = await made.client(), await made.client(), await made.client()
        for slowly, emptily in ((HEAD, b"\r\n"), (b"x", b"\r\n"), (b"x", b"\r\n")):
            await sent(made, heard, slow, slowly)
            await sent(made, heard, empty, emptily)
            assert made.ends() == {}
            made.let_pass(400.0)
        assert await silent.ended() == b""
        assert (await slow.answer())[0] == 408
        assert (await empty.answer())[0] == 408
        assert made.ends() == {"silent": 1, "header_timeout": 2}


async def test_a_kept_connection_has_its_time(tokenizer: Tokenizer, heard: Counter[int]) -> None:
    async with door(tokenizer, keep_alive_timeout=1000.0, header_timeout=2000.0) as made:
        idle, dripping, busy = await made.client(), await made.client(), await made.client()
        for client in (idle, dripping):
            await client.send(GET)
            assert (await client.answer())[0] == 200
        await busy.send(post())
        await made.until(lambda: made.script.started)
        await sent(made, heard, dripping, b"\r\n")
        made.let_pass(1200.0)
        assert await idle.ended() == b"" and made.ends() == {"keep_alive": 1}
        await sent(made, heard, dripping, b"\r\n")
        made.let_pass(1200.0)
        assert (await dripping.answer())[0] == 408
        made.go.set()
        assert (await busy.answer())[0] == 200  # no timer runs while a request does
        assert made.ends() == {"keep_alive": 1, "header_timeout": 1}


async def test_one_address_keeps_to_its_share(tokenizer: Tokenizer) -> None:
    """Its idle connections make room for its new ones; when all are busy, the next is told so."""
    async with door(tokenizer, max_connections_per_address=2) as made:
        idle, busy = await made.client(), await made.client()
        await idle.send(GET)
        assert (await idle.answer())[0] == 200
        await busy.send(post())
        await made.until(lambda: made.script.started)
        third = await made.client()
        assert await idle.ended() == b""
        await third.send(post())
        await made.until(lambda: len(made.script.started) == 2)
        refused = await made.client()
        status, headers, body = await refused.answer()
        assert (status, headers["connection"], headers["retry-after"]) == (429, "close", "1")
        assert json.loads(body)["error"]["code"] == "address"
        other = await made.client("127.0.0.2")
        await other.send(GET)
        assert (await other.answer())[0] == 200
        made.go.set()
        assert (await busy.answer())[0] == (await third.answer())[0] == 200
        assert made.ends() == {"evicted": 1, "address": 1}


async def test_all_connections_have_a_bound(tokenizer: Tokenizer) -> None:
    async with door(tokenizer, max_connections=2) as made:
        first, second = await made.client(), await made.client("127.0.0.2")
        await second.send(post())
        await made.until(lambda: made.script.started)
        third = await made.client("127.0.0.3")
        assert await first.ended() == b""
        await third.send(post())
        await made.until(lambda: len(made.script.started) == 2)
        status, headers, body = await (await made.client("127.0.0.4")).answer()
        assert (status, headers["connection"]) == (503, "close")
        assert json.loads(body)["error"]["code"] == "connections"
        assert made.server.connections().open == {"idle": 0, "busy": 2}
        made.go.set()
        assert (await second.answer())[0] == (await third.answer())[0] == 200
        assert made.ends() == {"evicted": 1, "connections": 1}


async def test_a_broken_body_ends_its_own_request(tokenizer: Tokenizer) -> None:
    async with door(tokenizer) as made:
        client = await made.client()
        await client.send(CHUNKED, b"zzz\r\n")
        assert (await client.answer())[0] == 400
        assert made.script.started == []


@pytest.mark.parametrize("head", [b"content-length: 100000000\r\n", b"transfer-encoding: chunked\r\n"])
async def test_without_a_key_nothing_is_held(
    tokenizer: Tokenizer, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 401 comes before the body, is read by a client that goes on sending, and is the last: the end comes with it."""
    monkeypatch.setattr("deploy.runtime.http_connection.LINGER_S", 1000.0)
    async with door(tokenizer, api_key=KEY) as made:
        client = await made.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: door\r\n" + head + b"\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert made.server.connections().open == {"idle": 1, "busy": 0}
        await client.send(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        assert await client.ended() == b""
        assert made.ends() == {"body_unread": 1}


async def test_whoever_goes_on_sending_after_the_last_answer_is_cut_off(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.runtime.http_connection.LINGER_S", 0.2)
    async with door(tokenizer, api_key=KEY) as made:
        client = await made.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: door\r\ncontent-length: 100000000\r\n\r\n")
        assert (await client.answer())[0] == 401
        await made.until(lambda: not made.server.table)


async def test_a_401_without_a_body_closes_too(tokenizer: Tokenizer) -> None:
    async with door(tokenizer, api_key=KEY) as made:
        client = await made.client()
        await client.send(b"GET /v1/models HTTP/1.1\r\nhost: door\r\n\r\n")
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (401, "close")
        assert await client.ended() == b""


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
OFFERED = post(more=OFFER)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([OFFERED + GET], id="at once"),
        pytest.param([OFFERED[:-40], OFFERED[-40:] + GET], id="in the middle of the body"),
        pytest.param([OFFERED[:-66], OFFERED[-66:], GET], id="after the headers"),
        pytest.param([HEAD + OFFER + b"\r\n" + GET], id="without a body"),
        pytest.param([CHUNKED.replace(b"\r\n", b"\r\n" + OFFER, 1), b"0\r\n\r\n" + GET], id="in chunks"),
    ],
)
async def test_another_protocol_is_declined_and_the_connection_goes_on(
    tokenizer: Tokenizer, parts: list[bytes]
) -> None:
    """Java's HTTP client offers h2c with every request."""
    async with door(tokenizer) as made:
        made.go.set()
        client = await made.client()
        for _ in range(2):
            await client.send(*parts)
            assert (await client.answer())[0] == 200
            assert (await client.answer())[0] == 200


async def test_a_client_that_takes_nothing_does_not_hold_a_connection_that_closes(tokenizer: Tokenizer) -> None:
    """The rest of an answer that fits our buffer is never waited for without end."""
    async with door(tokenizer, send_timeout=0.1, keep_alive_timeout=0.1) as made:
        made.server.listening.setsockopt(1, 7, 4096)  # SOL_SOCKET, SO_SNDBUF: what is accepted has it too
        client = await made.client()
        client.writer.transport.get_extra_info("socket").setsockopt(1, 8, 1024)  # SO_RCVBUF
        client.writer.transport.pause_reading()
        await client.send(b"GET /openapi.json HTTP/1.1\r\nhost: door\r\n\r\n")
        await made.until(lambda: not made.server.table)
        assert sum(made.server.table.ended[end] for end in (ConnectionEnd.SEND_TIMEOUT, ConnectionEnd.KEEP_ALIVE)) > 0


@pytest.mark.parametrize("sent", [b"", HEAD, GET, b"nonsense\r\n\r\n", GET * 3 + HEAD], ids=repr)
async def test_a_connection_that_is_gone_is_freed_at_once(tokenizer: Tokenizer, sent: bytes) -> None:
    """Nothing of it waits for the collector of cycles, which comes late after a crowd."""
    async with door(tokenizer) as made:
        client = await made.client()
        gc.disable()
        try:
            await client.send(sent)
            gone = [weakref.ref(one) for one in made.server._server.server_state.connections]
            client.writer.close()
            await made.until(lambda: not made.server._server.server_state.connections)
            await made.until(lambda: [ref() for ref in gone] == [None])
        finally:
            gc.enable()


async def test_stopping_lets_the_answer_under_way_end(tokenizer: Tokenizer) -> None:
    async with door(tokenizer) as made:
        client = await made.client()
        await client.send(post(), GET)
        await made.until(lambda: made.script.started)
        stopping = asyncio.create_task(made.server.stop())
        await asyncio.sleep(0.3)
        made.go.set()
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.ended() == b""
        await stopping
