"""A deployment on Ray behind Ray Serve: streams and errors are the router's, and nothing is left at its end."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest

from deploy.on_ray.serve_app import build
from tests.flow.client import Client
from tests.flow.on_ray.nodes import SECONDS, RayNodes
from tests.flow.ports import free_port
from tests.flow.reference import prompts
from tests.flow.server import Asking, wait_until
from tests.tiny import tiny_llama

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'millrace[ray-serve]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of Ray's own

PLACEMENT = """
model = {model}
[router]
max_connections_per_address = 1
[common]
served_model_name = ["tiny"]
dtype = "float32"
kernels = "torch"
[[workers]]
role = "mixed"
[ray]
name = "behind"
"""


def test_streams_and_errors_are_the_routers_and_nothing_is_left(nodes: RayNodes, tmp_path_factory: Any) -> None:
    from ray import serve

    path = tiny_llama(tmp_path_factory.mktemp("ray") / "tiny", layers=2)
    placement, port = PLACEMENT.format(model=json.dumps(str(path))), free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"placement_toml": placement, "insecure": True}))
    door = Asking(f"http://127.0.0.1:{port}")
    known = "Ray Serve's proxy has heard of what is said to run, and the router of a worker: 404 and 503 until then"
    wait_until(lambda: door.get("/health")[0] == 200, SECONDS, known)
    client = Client(door.url)
    prompt = prompts(1, shortest=20, longest=30, seed=3)[0]
    asked = [client.start(prompt, stream=stream, max_tokens=20, temperature=0.0) for stream in (True, False)]
    streamed, whole = client.finish(asked)
    client.close()
    assert streamed == whole and asked[0].chunks > 10
    check_leaving_is_noticed(door, prompt)
    status, body = door.get("/v1/models/nobody")
    assert status == 404 and json.loads(body)["error"]["type"]
    serve.shutdown()
    wait_until(lambda: not nodes.names() and not nodes.groups(), SECONDS, "no actor and no group is left")


def check_leaving_is_noticed(door: Asking, prompt: Sequence[int]) -> None:
    """Through Ray Serve's proxy and the replica: the router gives up what nobody reads."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    asked = urllib.request.Request(
        f"{door.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        assert answer.readline().startswith(b"data: ")
    wait_until(lambda: door.metric("request_success_total", finished_reason="abort") == 1, SECONDS, "it was given up")
