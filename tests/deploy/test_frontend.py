"""What the front tells of its workers."""

from __future__ import annotations

from pathlib import Path

from deploy.frontend import Frontend, served_model
from deploy.runtime.http_server import bind
from serving.config import HttpConfig
from serving.text.tokenizer import load_tokenizer
from tests.router.conftest import World
from tests.tiny import tiny_llama


async def test_metrics_have_one_worker_of_a_name(tmp_path: Path) -> None:
    """A worker that has left is remembered for a while; the next of its name may be there before that is over."""
    world = World()
    world.add("a", instance="a-1", address="local:1", draining=True, running=7)
    world.add("a", instance="a-2", address="local:2", running=3)
    path = tiny_llama(tmp_path / "tiny", layers=1)
    listening = bind("127.0.0.1", 0)
    with listening:
        served = served_model(path, "tiny", 100, 384, None)
        front = Frontend(world.placer, HttpConfig(), served, load_tokenizer(path), listening)
        lines = front.metrics.text().decode().splitlines()
    assert [line for line in lines if line.startswith("millrace:num_requests_running{")] == [
        'millrace:num_requests_running{engine="a",model_name="tiny"} 3.0'
    ]
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert sorted(set(samples)) == sorted(samples)
    await world.fleet.close()
