"""A deployment on Ray behind Ray Serve: streams and errors are the router's, and nothing is left at its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.on_ray.serve_app import build
from tests.flow.client import Client
from tests.flow.ports import free_port
from tests.flow.reference import prompts
from tests.flow.server import Asking, wait_until
from tests.tiny import tiny_llama

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'millrace[ray-serve]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings of Ray's own

PLACEMENT = """
model = {model}
[common]
served_model_name = ["tiny"]
dtype = "float32"
kernels = "torch"
[[workers]]
role = "mixed"
[ray]
name = "behind"
"""
STORE = 80_000_000


@pytest.fixture
def ray() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    quick = {"_system_config": {"prestart_worker_first_driver": False}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE, **quick})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
    finally:
        ray.shutdown()  # type: ignore[no-untyped-call]
        cluster.shutdown()


def test_streams_and_errors_are_the_routers_and_nothing_is_left(ray: Any, tmp_path_factory: Any) -> None:
    from ray import serve

    path = tiny_llama(tmp_path_factory.mktemp("ray") / "tiny", layers=2)
    placement, port = PLACEMENT.format(model=json.dumps(str(path))), free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"placement_toml": placement, "insecure": True}))
    door = Asking(f"http://127.0.0.1:{port}")
    assert door.get("/health")[0] == 200
    client = Client(door.url)
    prompt = prompts(1, shortest=20, longest=30, seed=3)[0]
    asked = [client.start(prompt, stream=stream, max_tokens=20, temperature=0.0) for stream in (True, False)]
    streamed, whole = client.finish(asked)
    client.close()
    assert streamed == whole and asked[0].chunks > 10
    status, body = door.get("/v1/models/nobody")
    assert status == 404 and json.loads(body)["error"]["type"]
    serve.shutdown()
    wait_until(lambda: not ray.util.list_named_actors(all_namespaces=True), 60.0, "no actor is left")
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}
