"""The KV pool killed under load, one node and all: no request fails, no text differs, and reuse comes back."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import pytest

from tests.flow.client import Client
from tests.flow.reference import prompts
from tests.flow.server import MillraceServer, wait_until

pytestmark = pytest.mark.slow

PROMPTS = prompts(8, shortest=150, longest=170, seed=90)  # twice what a worker's own cache holds
BLOCKS = sum(len(prompt) // 16 for prompt in PROMPTS)
NODES = ("kvcache-0", "kvcache-1")
Outcome = tuple[str, str | None, int, int]


def ask_all(client: Client) -> list[Outcome]:
    asked = [
        client.start(prompt, stream=number % 2 == 0, max_tokens=20, temperature=0)
        for number, prompt in enumerate(PROMPTS)
    ]
    for one in asked:
        assert one.done is not None
        one.done.result(60)
    return [one.outcome() for one in asked]


def runs(server: MillraceServer, node: str) -> bool:
    try:
        return server.worker_pid(node) > 0
    except AssertionError:
        return False


def hits(server: MillraceServer) -> float:
    return server.metric("external_prefix_cache_hits_total")


def fill(server: MillraceServer, client: Client, undisturbed: list[Outcome]) -> None:
    """Ask until both nodes hold most of the prompts: so small a worker offers only some of its blocks each time."""

    def filled() -> bool:
        assert ask_all(client) == undisturbed
        return all(server.metric("pool_blocks", node=node, tier="ram") >= 0.8 * BLOCKS for node in NODES)

    wait_until(filled, 90, "the pool holds the prompts")


def test_nodes_killed_under_load(tiny_path: Path) -> None:
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--kernels", "torch", "--num-kv-blocks", "48")
    flags += ("--prefill", "2", "--decode", "1", "--kvcache", "2", "--replication", "2", "--heartbeat-interval", "0.1")
    flags += ("--kvcache-fetch", "always")  # so small a model computes as quickly
    with MillraceServer(str(tiny_path), *flags, workers=("prefill-0", "prefill-1", "decode-0")) as server:
        client = Client(server.url)
        wait_until(lambda: all(server.metric("pool_capacity_bytes", node=node) for node in NODES), 90, "both nodes")
        undisturbed = ask_all(client)
        fill(server, client, undisturbed)
        assert ask_all(client) == undisturbed
        before = hits(server)
        assert before > 0

        rounds = [client.pool.submit(ask_all, Client(server.url)) for _ in range(2)]
        server.signal_worker("kvcache-0", SIGKILL)
        for each in rounds:
            assert each.result(90) == undisturbed
        assert ask_all(client) == undisturbed
        wait_until(lambda: hits(server) > before, 60, "what the other node keeps is used")

        wait_until(lambda: all(runs(server, node) for node in NODES), 90, "the dead node was started again")
        for node in NODES:
            server.signal_worker(node, SIGKILL)
        assert ask_all(client) == undisturbed
        wait_until(
            lambda: all(server.metric("pool_capacity_bytes", node=node) for node in NODES), 90, "both nodes are back"
        )

        def reused() -> bool:
            """New nodes are empty: what is computed again is stored again, and then used."""
            seen = hits(server)
            assert ask_all(client) == undisturbed
            return hits(server) > seen

        wait_until(reused, 90, "prefixes are reused again")
        server.wait_idle()
        client.close()
