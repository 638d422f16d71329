"""An old and a new generation under one router, with real workers: no KV goes from one to the other, and where a router
pairs them all the same, the decode worker notices, refuses and counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from router.fleet import RouterConfig
from serving import messages
from serving.config import EngineConfig, ModelConfig
from serving.loader.loading import LoadedModel, load
from serving.messages import KV_PROTOCOL, Role
from tests.fakes.sequences import make_request
from tests.flow.conftest import Cluster
from tests.flow.reference import is_greedy_tiny, prompts
from tests.tiny import tiny_llama

ROLES = (Role.PREFILL, Role.DECODE)
COUNT = 8  # tokens of a text


class RollingCluster(LocalCluster):
    """A prefill and a decode worker of each generation: a model and a KV protocol."""

    def __init__(self, generations: Sequence[tuple[LoadedModel, int]]):
        self.generations = generations
        config = EngineConfig(num_kv_blocks=256, block_size=16)
        asked = RouterConfig(patience=20.0)
        super().__init__(generations[0][0], ModelConfig(), config, asked, roles=ROLES * len(generations))

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        self.model, protocol = self.generations[number // len(ROLES)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "KV_PROTOCOL", protocol)
            return super()._worker(role, number, dialer)

    def mixed_pairs(self) -> float:
        return sum(worker.status().counters.get("mixed_pairs", 0.0) for worker in self.workers)


class BlindCluster(RollingCluster):
    """Its router takes all workers for one generation."""

    def beat(self) -> None:
        for worker in self.workers:
            self.fleet.heartbeat(replace(worker.status(), pairing="any", kv_protocol=KV_PROTOCOL))


@pytest.fixture(scope="module")
def next_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "next", seed=7)


@pytest.fixture(params=["model", "protocol"])
def generations(
    request: pytest.FixtureRequest, tiny_model: LoadedModel, next_path: Path
) -> list[tuple[LoadedModel, int]]:
    if request.param == "model":
        return [(tiny_model, KV_PROTOCOL), (load(next_path, "float32"), KV_PROTOCOL)]
    return [(tiny_model, KV_PROTOCOL), (tiny_model, KV_PROTOCOL + 1)]


@asynccontextmanager
async def running(made: RollingCluster) -> AsyncIterator[Cluster]:
    async with made:
        cluster = Cluster(made)
        yield cluster
        await cluster.idle()


async def texts(cluster: Cluster, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    requests = [
        make_request(prompt, request_id=f"r{number}", max_tokens=COUNT, ignore_eos=True)
        for number, prompt in enumerate(asked)
    ]
    return await asyncio.gather(*(cluster.tokens(request) for request in requests))


async def test_each_text_is_of_one_generation_and_both_have_their_share(
    generations: list[tuple[LoadedModel, int]],
) -> None:
    asked = prompts(24, longest=60, seed=11)
    made = RollingCluster(generations)
    async with running(made) as cluster:
        found = await texts(cluster, asked)
        handoffs = [sum(worker.decode.handoffs.values()) for worker in made.workers if worker.decode is not None]
    for prompt, tokens in zip(asked, found, strict=True):
        assert len(tokens) == COUNT
        assert any(is_greedy_tiny(Path(model.path), prompt, tokens) for model, _ in generations)
    assert sum(handoffs) == len(asked) and min(handoffs) >= 3
    assert made.mixed_pairs() == 0 and cluster.seen.replacements == []


async def test_a_router_that_pairs_freely_is_found_out(generations: list[tuple[LoadedModel, int]]) -> None:
    made = BlindCluster(generations)
    async with running(made) as cluster:
        await texts(cluster, prompts(24, longest=60, seed=12))
    assert made.mixed_pairs() > 0
    refused = sum(worker.decode.refused["generation"] for worker in made.workers if worker.decode is not None)
    assert refused == made.mixed_pairs(), "none of that KV was taken"
