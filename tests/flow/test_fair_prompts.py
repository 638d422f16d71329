"""A key that sends long prompts over many connections does not keep another key's first token waiting.

Over a real wire too: workers are told whose a prompt is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serving.loader.loading import LoadedModel, load
from serving.messages import Request, SamplingParams
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import prompts
from tests.tiny import tiny_llama

CONNECTIONS = 8
LONG = 960  # tokens
CHATS = 4


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Steps of 64 prompt tokens take milliseconds, so that prompts wait for each other."""
    path: Path = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=8, max_position=2048)
    return load(path, "float32")


class Clients:
    """Requests of two keys at one cluster, and when first tokens came."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.firsts: list[str] = []  # keys, in the order of first tokens

    async def ask(self, name: str, prompt: list[int], key: str) -> None:
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt=tuple(prompt), sampling=sampling, client=key)
        first = True
        async for _ in self.cluster.router.generate(request):
            if first:
                self.firsts.append(key)
                first = False

    async def greedy(self, connection: int, stopped: asyncio.Event) -> None:
        """Long prompts one after the other, each asked as soon as the last is answered."""
        number = 0
        while not stopped.is_set():
            (prompt,) = prompts(1, shortest=LONG, longest=LONG, seed=100 * connection + number)
            await self.ask(f"long-{connection}-{number}", prompt, "greedy")
            number += 1

    async def backlog(self) -> None:
        """Until most of the long prompts wait at the workers."""
        workers = self.cluster.cluster.workers
        while sum(len(worker.prefill.scheduler.queue) for worker in workers) < CONNECTIONS - 2:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("placement", ["embedded", "split-grpc"])
async def test_long_prompts_of_one_key_do_not_hold_up_another(
    make_cluster: ClusterMaker, slow_model: LoadedModel, placement: str
) -> None:
    settings = {"max_num_batched_tokens": 64, "num_kv_blocks": 1024, "kernels": "torch", "num_speculative_tokens": 0}
    async with make_cluster(placement, model=slow_model, **settings) as cluster:
        clients, stopped = Clients(cluster), asyncio.Event()
        greedy = [asyncio.create_task(clients.greedy(number, stopped)) for number in range(CONNECTIONS)]
        try:
            for number, prompt in enumerate(prompts(CHATS, shortest=40, longest=60, seed=7)):
                await clients.backlog()
                before = len(clients.firsts)
                await clients.ask(f"chat-{number}", prompt, "chat")
                passed = clients.firsts[before:].index("chat")
                assert passed <= 2, f"{passed} long prompts were computed before it"
        finally:
            stopped.set()
            await asyncio.gather(*greedy)
