"""Requests sent ahead of their answers: order, bounds, and what becomes of them when the client leaves."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from deploy.runtime.http_connection import MOST_AHEAD, MOST_BYTES_AHEAD
from serving.messages import FinishReason
from serving.text.tokenizer import Tokenizer
from tests.deploy.runtime.door import CHUNKED, GET, HEAD, door, post
from tests.fakes.fault_proxy import RESET_AT_ONCE
from tests.fakes.generate import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def test_pipelined_requests_are_answered_in_order(tokenizer: Tokenizer) -> None:
    async with door(tokenizer) as made:
        client = await made.client()
        paths = [b"/live", b"/version", b"/nowhere", b"/load"]
        await client.send(post(stream=True), *[b"GET %b HTTP/1.1\r\nhost: door\r\n\r\n" % path for path in paths])
        await made.until(lambda: made.script.started)
        made.go.set()
        statuses = [(await client.answer())[0] for _ in range(5)]
        assert statuses == [200, 200, 200, 404, 200]
        await client.send(GET)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("second", [post(tokens=5), post(tokens=5) + GET * 3, HEAD, post()[:-5]], ids=repr)
@pytest.mark.parametrize("leave", ["close", "reset", "half"])
async def test_a_client_that_leaves_ends_all_it_has_sent(tokenizer: Tokenizer, second: bytes, leave: str) -> None:
    """The one that runs, and those behind it, which never begin."""
    async with door(tokenizer) as made:
        client = await made.client()
        await client.send(post(stream=True), second)
        await made.until(lambda: made.script.started)
        if leave == "close":
            client.writer.close()
        elif leave == "reset":
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
            client.writer.transport.abort()
        else:
            client.writer.write_eof()
        await made.script.all_closed.wait()
        await made.app.state.in_flight.wait_idle()
        assert len(made.script.started) == 1
        assert [reason for reason, _ in made.observer.finished] == [FinishReason.ABORT]


@pytest.mark.parametrize("size", [1, MOST_BYTES_AHEAD // 4])
async def test_a_large_request_behind_one_that_runs_hides_no_hang_up(tokenizer: Tokenizer, size: int) -> None:
    async with door(tokenizer) as made:
        client = await made.client()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: door\r\ncontent-length: 1000000\r\n\r\n"
        await client.send(post(), head, *[b"x" * size] * 3)
        await made.until(lambda: made.script.started)
        client.writer.close()
        await made.script.all_closed.wait()


@pytest.mark.parametrize(
    ("ahead", "answered", "end", "status"),
    [
        pytest.param(GET * (MOST_AHEAD + 1), MOST_AHEAD, "pipelined", 429, id="many"),
        pytest.param(GET * 20_000, MOST_AHEAD, "pipelined", 429, id="very many"),
        pytest.param(
            b"POST /v1/completions HTTP/1.1\r\nhost: door\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 300_000,
            0,
            "pipelined",
            429,
            id="a large body",
        ),
        pytest.param(GET + b"nonsense\r\n\r\n", 1, "malformed", 400, id="nonsense"),
        pytest.param(GET + HEAD + b"x: " + b"y" * 40_000, 1, "header_size", 431, id="a long header"),
        pytest.param(CHUNKED + b"zzz\r\n", 0, "malformed", 400, id="a bad chunk"),
    ],
)
async def test_what_is_sent_ahead_is_bounded_and_harms_no_answer(
    tokenizer: Tokenizer, ahead: bytes, answered: int, end: str, status: int
) -> None:
    """The refusal comes after the answers of those before it, the one under way among them."""
    async with door(tokenizer) as made:
        client = await made.client()
        await client.send(post(stream=True, tokens=9), ahead)
        await made.until(lambda: made.script.started)
        sending = asyncio.create_task(client.writer.drain())
        made.go.set()
        _, _, body = await client.answer()
        assert body.count(b"data: ") == 10 and b"data: [DONE]" in body
        for _ in range(answered):
            assert (await client.answer())[0] == 200
        found, headers, body = await client.answer()
        assert (found, headers["connection"], json.loads(body)["error"]["code"]) == (status, "close", end)
        assert made.ends() == {end: 1}
        await asyncio.gather(sending, return_exceptions=True)
        assert len(made.script.started) == 1
