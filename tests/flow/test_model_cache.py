"""--load-format pool: the first worker of a model fills the pool, the next ones start from it, and serve the same."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import httpx
import pytest

from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer, wait_until

pytestmark = pytest.mark.slow


def test_a_worker_that_comes_back_starts_from_the_pool(tiny_path: Path) -> None:
    flags = (str(tiny_path), "--served-model-name", "tiny", "--dtype", "float32", "--load-format", "pool")
    [prompt] = prompts(1, shortest=30, longest=30, seed=95)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0, "return_token_ids": True}
    with MillraceServer(*flags, "--mixed", "1", "--kvcache", "1", workers=("mixed-0",)) as server:
        wait_until(lambda: "is in the KV pool now" in server.log(), 90, "the model is stored")
        assert "loaded from the KV pool" not in server.log()
        before = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        server.signal_worker("mixed-0", SIGKILL)
        wait_until(lambda: "loaded from the KV pool" in server.log(), 90, "a worker starts from the pool")
        server.wait_ready()
        after = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert after["text"] == before["text"]
    assert is_greedy_tiny(tiny_path, prompt, after["token_ids"])
