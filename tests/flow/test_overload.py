"""Too many requests, and workers that hang without dying: waiting, an honest 429, and going on elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from signal import SIGCONT

import httpx
import pytest

from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer
from tests.flow.test_hangup import stream

pytestmark = pytest.mark.slow


async def test_overload_is_a_429_that_says_when_to_come_back(tiny_path: Path) -> None:
    """One sequence at a time, one may wait: the rest are told at once, those who waited too long after a while."""
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--max-num-seqs", "1", "--max-waiting", "1")
    flags += (
        "--kernels",
        "torch",
        "--num-speculative-tokens",
        "0",
    )  # the text that runs must outlast the others' patience
    with MillraceServer(str(tiny_path), *flags, "--queue-patience", "0.2", workers=("mixed-0",)) as server:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 900, "temperature": 0}
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses[0] == 200
        assert statuses[1:] == [429] * 5
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full", "no_room"}
        await asyncio.to_thread(server.wait_idle)


async def test_a_hanging_decode_worker_is_taken_for_dead(tiny_path: Path) -> None:
    """It keeps its sockets open and says nothing: its streams go on elsewhere, and waking it frees everything."""
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--prefill", "1", "--decode", "2")
    flags += ("--kernels", "torch")  # slow enough to look at
    beats = ("--heartbeat-interval", "0.1", "--heartbeat-timeout", "1.5")
    wanted = prompts(4, shortest=20, longest=60, seed=60)
    workers = ("prefill-0", "decode-0", "decode-1")
    with MillraceServer(str(tiny_path), *flags, *beats, workers=workers) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asking = [asyncio.create_task(stream(client, prompt, 1000, None)) for prompt in wanted]
            while server.metric("worker_num_requests_running", engine="decode-0") < 1:
                await asyncio.sleep(0.02)
            server.stop_worker("decode-0")
            while not server.metric("replacements_total"):
                await asyncio.sleep(0.02)
            server.signal_worker("decode-0", SIGCONT)
            await asyncio.to_thread(server.wait_ready)
            while server.metric("worker_num_requests_running", engine="decode-0"):
                assert not all(task.done() for task in asking), "it was meant to free at once what it held"
                await asyncio.sleep(0.02)
            found = await asyncio.gather(*asking)
        await asyncio.to_thread(server.wait_idle)
    for prompt, tokens in zip(wanted, found, strict=True):
        assert len(tokens) == 1000
        assert is_greedy_tiny(tiny_path, prompt, tokens)
