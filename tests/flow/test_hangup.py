"""Clients that leave: sixty-four streams of mixed lengths, a tenth of which hang up; the rest are served correctly."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer, wait_until

pytestmark = pytest.mark.slow

STREAMS = 64


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[MillraceServer]:
    arguments = (str(tiny_path), "--prefill", "1", "--decode", "2", "--dtype", "float32", "--served-model-name", "tiny")
    with MillraceServer(*arguments, workers=("prefill-0", "decode-0", "decode-1")) as started:
        yield started


async def stream(
    client: httpx.AsyncClient, prompt: list[int], count: int, leave_after: int | None, **more: object
) -> list[int]:
    """Token ids of a streamed greedy completion; hangs up after so many chunks when told to."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, **more}
    body["return_token_ids"] = True
    tokens: list[int] = []
    ended = False
    chunks = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                break
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or []
            chunks += 1
            if leave_after is not None and chunks >= leave_after:
                return tokens
    assert ended, "the stream broke off"
    return tokens


async def test_64_streams_a_tenth_hanging_up(server: MillraceServer, tiny_path: Path) -> None:
    chance = random.Random(64)
    wanted = prompts(STREAMS, shortest=3, longest=300, seed=30)
    counts = [chance.randint(5, 60) for _ in wanted]
    leavers = set(chance.sample(range(STREAMS), STREAMS // 10))
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=100)) as client:
        found = await asyncio.gather(
            *(
                stream(client, prompt, count, chance.randint(1, 4) if i in leavers else None)
                for i, (prompt, count) in enumerate(zip(wanted, counts, strict=True))
            )
        )
    for i, (prompt, count, tokens) in enumerate(zip(wanted, counts, found, strict=True)):
        assert len(tokens) == count or i in leavers, f"stream {i}"
        assert is_greedy_tiny(tiny_path, prompt, tokens), f"stream {i}"
    await asyncio.to_thread(server.wait_idle)
    assert server.metric("leaked_blocks") == 0


async def test_hanging_up_frees_everything_within_a_step(server: MillraceServer) -> None:
    """Streaming or not, queued or decoding: the request is gone before the next one is asked for."""
    prompt = prompts(1, shortest=200, longest=200, seed=31)[0]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1500, "temperature": 0}
    for streaming in (True, False):
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            while True:
                asking = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": streaming}))
                while not asking.done() and not await asyncio.to_thread(decoding, server):
                    await asyncio.sleep(0)
                caught = asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                if caught:  # a quick machine may have written it all between two looks
                    break
        await asyncio.to_thread(server.wait_idle, 2.0)


def test_a_client_that_reads_nothing_holds_nothing_for_ever(tiny_path: Path) -> None:
    """Its streams are more than all buffers on the way hold; once nothing has been taken for a while, they are over."""
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--send-timeout", "0.3")
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1500, "stream": True, "n": 8, "logprobs": 5}
    text = json.dumps({**body, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: tiny\r\ncontent-length: {len(text)}\r\n\r\n".encode()
    with MillraceServer(str(tiny_path), *flags, workers=("mixed-0",)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head + text)
        wait_until(lambda: server.metric("request_success_total", finished_reason="abort"), 60.0, "it is given up")
        server.wait_idle()


def decoding(server: MillraceServer) -> bool:
    """Whether a decode worker holds a sequence this moment; heartbeats would tell later."""
    return any(
        service["held"].get("sequences") for service in server.audit()["services"] if "decode" in service["service"]
    )
