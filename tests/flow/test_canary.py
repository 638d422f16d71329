"""The canary on real processes: a pair is green while it works, red within 5 s of a freeze, and green again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from signal import SIGCONT

import pytest

from tests.fakes.awake import Awake
from tests.flow.server import MillraceServer, wait_until
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow

RED_SECONDS = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MillraceServer]:
    path = tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    workers = ("prefill-0", "decode-0", "decode-1")
    flags = ("--prefill", "1", "--decode", "2", "--kernels", "torch", "--dtype", "float32", "--num-kv-blocks", "64")
    with MillraceServer(str(path), *flags, "--canary-interval", "2", workers=workers) as started:
        yield started


def up(server: MillraceServer, decode: str) -> bool:
    return server.metric("pair_up", prefill="prefill-0", decode=decode) == 1.0


def test_a_frozen_worker_is_red_within_five_seconds_and_green_again_afterwards(server: MillraceServer) -> None:
    wait_until(lambda: server.metric("canary_probes_total", outcome="ok") >= 4, 60.0, "the canary goes round")
    assert up(server, "decode-0") and up(server, "decode-1")
    assert json.loads(server.get("/health")[1]) == {"status": "ok"}
    assert server.metric("time_to_first_token_seconds_count") == 0.0, "users' metrics know nothing of it"
    server.stop_worker("decode-0")
    try:
        with Awake() as awake:
            began = time.monotonic()
            wait_until(lambda: not up(server, "decode-0"), 60.0, "red")
            assert awake.seconds(began) < RED_SECONDS
        assert up(server, "decode-1")
        code, body = server.get("/health")
        assert code == 200 and "prefill-0 to decode-0" in json.loads(body)["detail"]
    finally:
        server.signal_worker("decode-0", SIGCONT)
    wait_until(lambda: up(server, "decode-0"), 60.0, "green again")
    wait_until(lambda: json.loads(server.get("/health")[1]) == {"status": "ok"}, 60.0, "healthy")
    server.wait_idle()
