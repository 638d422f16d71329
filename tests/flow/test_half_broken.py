"""Half-broken processes under a running stream: the text is whole, and what was healthy is not taken for dead."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from signal import SIGCONT

import pytest

from tests.fakes.stopping import stop
from tests.flow.client import Client
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MillraceServer]:
    path = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=8, hidden=256, kv_heads=4)
    flags = ("--prefill", "1", "--decode", "1", "--kernels", "torch", "--dtype", "float32", "--num-kv-blocks", "256")
    beats = ("--heartbeat-interval", "0.2", "--heartbeat-timeout", "2", "--served-model-name", "tiny")
    with MillraceServer(str(path), *flags, *beats, workers=("prefill-0", "decode-0")) as started:
        yield started


def test_a_router_that_stood_still_takes_nobody_for_dead(server: MillraceServer) -> None:
    """A host is frozen for three times the silence of a dead worker, in a stream; the router is the first to go on."""
    client = Client(server.url)
    try:
        [prompt] = prompts(1, shortest=200, longest=220, seed=5)
        [undisturbed] = client.finish([client.start(prompt, max_tokens=120, stream=True, temperature=0.0)])
        asked = client.start(prompt, max_tokens=120, stream=True, temperature=0.0)
        assert asked.progressed.wait(60), "the stream runs"
        frozen = (server.process.pid, server.worker_pid("decode-0"))
        for process in frozen:
            stop(process)
        time.sleep(6.0)
        for process in frozen:
            os.kill(process, SIGCONT)
            time.sleep(0.8)
        assert client.finish([asked]) == [undisturbed]
        assert server.metric("replacements_total") == 0
        assert "nobody's silence meanwhile counts" in server.log()
        assert all(server.log().count(f"worker {name} (") == 1 for name in ("prefill-0", "decode-0")), "here, once"
        server.wait_idle()
    finally:
        client.close()
