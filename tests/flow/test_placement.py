"""`millrace serve --placement FILE` on real processes: each group is as the file says, and they serve together."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until

pytestmark = pytest.mark.thorough

PLACEMENT = """
model = {model}

[common]
served_model_name = ["tiny"]
dtype = "float32"
kernels = "torch"
heartbeat_interval = 0.1

[router]
routing_policy = "prefix_aware"

[[workers]]
role = "prefill"
name = "reader"
num_kv_blocks = 100

[[workers]]
role = "decode"
num_kv_blocks = 40

[kvcache]
ram = "16MiB"
"""


def test_every_group_is_as_the_file_says(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "placement.toml"
    file.write_text(PLACEMENT.format(model=json.dumps(str(tiny_path))))
    [prompt] = prompts(1, shortest=100, longest=100, seed=5)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    with MillraceServer("--placement", str(file), workers=("reader-0", "decode-0")) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 16
        assert answer.headers["x-millrace-placement"].startswith("prefill=reader-0;decode=decode-0;reason=prefix_aware")
        wait_until(lambda: server.metric("pool_blocks", tier="ram") >= 6, 60, "the pool's node has the prompt")
        assert server.metric("cache_config_info", num_gpu_blocks="140") == 1
        server.wait_idle()
        assert server.stop() == 0
