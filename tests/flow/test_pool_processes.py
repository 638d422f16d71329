"""The KV pool on real processes: a disk outlives a restart, and a decode worker brings a prefix by itself."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.flow.client import Client
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until
from tests.flow.test_pool import BLOCK
from tests.flow.test_pool_direct import PREFIX, PROMPT

pytestmark = pytest.mark.thorough


def test_one_process_with_a_disk_remembers_across_a_restart(tiny_path: Path, tmp_path: Path) -> None:
    """`millrace serve --disk FOLDER`: the pool is part of the process, and its blocks are there the next time."""
    flags = (str(tiny_path), "--served-model-name", "tiny", "--dtype", "float32", "--disk", str(tmp_path / "pool"))
    flags += ("--kvcache-fetch", "always")
    [prompt] = prompts(1, shortest=150, longest=150, seed=89)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answers = []
    for _ in range(2):
        with MillraceServer(*flags, workers=("mixed-0",)) as server:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json())
            server.wait_idle()
            assert server.stop() == 0
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, (len(prompt) - 1) // BLOCK * BLOCK]


def test_a_decode_worker_brings_the_prefix_from_the_pool(tiny_path: Path) -> None:
    """Of two decode workers the one that has not had the prompt yet brings it from the pool, a process too."""
    flags = (str(tiny_path), "--served-model-name", "tiny", "--dtype", "float32", "--kernels", "torch")
    flags += ("--prefill", "1", "--decode", "2", "--kvcache", "1", "--heartbeat-interval", "0.1")
    flags += ("--kvcache-direct", "always")
    with MillraceServer(*flags, workers=("prefill-0", "decode-0", "decode-1")) as server:
        client = Client(server.url)

        def counted() -> tuple[float, float]:
            """Bytes handed over, and tokens that decode workers brought from the pool."""
            return server.metric("kv_transfer_bytes_total"), server.metric("kvcache_direct_tokens_total")

        def accounted(tokens: int) -> bool:
            """If this many tokens of prompts have reached decode workers."""
            sent, brought = counted()
            return sent + brought * token == tokens * token

        token = 4 * 2 * 2 * 16 * 4  # bytes: layers, K and V, KV heads, their size, float32
        whole, rest = len(PROMPT), len(PROMPT) - PREFIX
        wait_until(
            lambda: server.log().count("the KV pool is kvcache-0@") == 3, 90, "every worker knows the pool's node"
        )
        [(text, *_)] = client.finish([client.start(PROMPT, stream=False, max_tokens=100, temperature=0)])
        wait_until(lambda: accounted(whole), 90, "the first decode worker has the prompt, by whatever way")
        wait_until(lambda: server.metric("pool_blocks", tier="ram") >= PREFIX // BLOCK, 90, "the pool has the prompt")
        before = counted()
        first = client.start(PROMPT, stream=True, max_tokens=1000, temperature=0)
        assert first.progressed.wait(60), "one of them is busy"
        asked = [first, client.start(PROMPT, stream=False, max_tokens=100, temperature=0)]
        longer, again = (outcome[0] for outcome in client.finish(asked))
        assert longer.startswith(text) and again == text
        after = before[0] + 2 * rest * token, before[1] + PREFIX
        wait_until(lambda: counted() == after, 90, "one brought the prefix, and only what follows it was handed over")
        assert not server.metric("kvcache_direct_fallbacks_total")
        server.wait_idle()
        client.close()
