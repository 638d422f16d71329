"""kill -9 of a decode worker with KV in its host memory: the text is that of an undisturbed run, nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGKILL

import pytest

from tests.flow.client import Asked, Client
from tests.flow.offloading import long_prompt
from tests.flow.server import MillraceServer, wait_until
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

WORKERS = ("prefill-0", "decode-0", "decode-1")
TRIES = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MillraceServer]:
    """A prompt of 1,500 tokens takes it a while, and its KV is far too large for socket buffers."""
    path = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=8, hidden=256, kv_heads=4)
    arguments = (
        str(path),
        *("--prefill", "1", "--decode", "2", "--served-model-name", "tiny", "--dtype", "float32"),
        *("--num-kv-blocks", "40", "--host-kv-memory", "64MiB", "--max-num-batched-tokens", "32"),
        *("--heartbeat-interval", "0.1", "--heartbeat-timeout", "30"),
    )
    with MillraceServer(*arguments, workers=WORKERS) as started:
        yield started


def test_a_decode_worker_dies_with_kv_in_its_host_memory(server: MillraceServer) -> None:
    """While it takes KV in: another takes over, and the client sees nothing of it. Once more if that was too late."""
    client, prompt = Client(server.url), long_prompt(1500)

    def moved_bytes() -> float:
        return server.metric("host_kv_bytes_out_total", engine="prefill-0")

    def ask() -> Asked:
        return client.start(prompt, stream=True, max_tokens=60, temperature=0)

    try:
        undisturbed = client.finish([ask()])
        wait_until(moved_bytes, 60, "a heartbeat tells that the device did not hold it all")
        for _ in range(TRIES):
            server.wait_ready()
            before, until_now = server.metric("replacements_total"), moved_bytes()
            one = ask()
            wait_until(lambda seen=until_now: moved_bytes() > seen, 60, "KV moves while it is handed over")
            victim = leased(server)
            if victim is not None:
                server.signal_worker(victim, SIGKILL)
            assert client.finish([one]) == undisturbed
            server.wait_idle()
            if server.metric("replacements_total") > before:
                return
        raise AssertionError(f"nothing was disturbed in {TRIES} tries")
    finally:
        client.close()


def leased(server: MillraceServer) -> str | None:
    """The decode worker that holds a lease."""
    services = [one for one in server.audit()["services"] if one["service"].startswith("decode")]
    return next((one["service"] for one in services if one["held"]["leases"]), None)
