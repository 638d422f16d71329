"""SIGTERM under load: new requests get 503, the streams in flight all finish with their whole text, exit code 0."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer
from tests.flow.test_hangup import stream

pytestmark = pytest.mark.slow

TOKENS = 600  # more than are written while the signal is taken, by kernels that are slow enough


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [((), ("mixed-0",)), (("--prefill", "1", "--decode", "1"), ("prefill-0", "decode-0"))],
    ids=["embedded", "split"],
)
async def test_sigterm_lets_streams_finish(
    tiny_path: Path, arguments: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    wanted = prompts(8, shortest=20, longest=200, seed=40)
    flags = (str(tiny_path), "--dtype", "float32", "--served-model-name", "tiny", "--kernels", "torch", *arguments)
    flags += ("--shutdown-timeout", "120")
    with MillraceServer(*flags, workers=workers) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asking = [asyncio.create_task(stream(client, prompt, TOKENS, None)) for prompt in wanted]
            while server.metric("generation_tokens_total") < 2 * len(wanted):
                await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            refused = await new_request(client)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert server.get("/health")[0] == 503
            assert server.get("/live")[0] == 200
            found = await asyncio.gather(*asking)
        assert await asyncio.to_thread(server.process.wait, 60) == 0, server.log()
    for prompt, tokens in zip(wanted, found, strict=True):
        assert len(tokens) == TOKENS
        assert is_greedy_tiny(tiny_path, prompt, tokens)


async def new_request(client: httpx.AsyncClient) -> httpx.Response:
    """A new request, once the signal has been taken."""
    while True:
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1})
        if answer.status_code != 200:
            return answer


async def test_a_worker_told_to_leave_moves_what_it_cannot_finish(tiny_path: Path) -> None:
    """SIGTERM to one decode worker with no time to finish: its streams go on, whole, at the other."""
    wanted = prompts(6, shortest=20, longest=100, seed=41)
    flags = (str(tiny_path), "--dtype", "float32", "--served-model-name", "tiny", "--prefill", "1", "--decode", "2")
    flags += ("--kernels", "torch")  # slow enough to be caught at it
    with MillraceServer(
        *flags,
        "--shutdown-timeout",
        "0.3",
        "--heartbeat-interval",
        "0.1",
        workers=("prefill-0", "decode-0", "decode-1"),
    ) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asking = [asyncio.create_task(stream(client, prompt, 900, None)) for prompt in wanted]
            while server.metric("worker_num_requests_running", engine="decode-0") < 1:
                await asyncio.sleep(0.02)
            server.signal_worker("decode-0", signal.SIGTERM)
            found = await asyncio.gather(*asking)
        assert server.metric("replacements_total") > 0, "the streams were meant to outlast its patience"
        await asyncio.to_thread(server.wait_idle)
    for prompt, tokens in zip(wanted, found, strict=True):
        assert len(tokens) == 900
        assert is_greedy_tiny(tiny_path, prompt, tokens)
