"""Workers whose ranks keep their heads' KV each on a device of its own: one process's text in every role and through
the pool, nothing held afterwards, and an end when a rank is lost. The devices are CPUs here
(tests.serving.rank_group.test_device_group).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deploy.local import LocalCluster
from deploy.worker.build import engine_of, kv_memory
from deploy.worker.computing import most_kept
from deploy.worker.model_cache import release
from kvcache.memory.device import token_bytes
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig, PoolConfig
from serving.engine.engine import Engine
from serving.engine.overlap import OverlapEngine
from serving.errors import WorkerLost
from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from serving.parallel.layout import ParallelLayout
from serving.rank_group.device_leader import ModelOnDevices, load_on_devices
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_pool import ask, served
from tests.flow.test_unequal_layouts import LayoutCluster
from tests.kvcache.pool.nodes import Cluster as Pool
from tests.tiny import tiny_llama

TOKENS = 12
CONFIG = ModelConfig(dtype="float32", tensor_parallel_size=2)
BLOCK = 16
ENGINE = EngineConfig(num_kv_blocks=48, block_size=BLOCK, max_num_batched_tokens=40, max_num_seqs=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=2, hidden=48, heads=6, kv_heads=3)


@contextmanager
def on_devices(path: Path) -> Iterator[ModelOnDevices]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_on_devices(path, "float32", ParallelLayout(tensor=2), 20.0, "cpu")
    try:
        yield model
    finally:
        release(model)
        torch.set_num_threads(threads)


@pytest.fixture
def shared(path: Path) -> Iterator[ModelOnDevices]:
    with on_devices(path) as model:
        yield model


@pytest.fixture(scope="module")
def one(path: Path) -> LoadedModel:
    """The same model in this process alone."""
    return load(path, "float32")


@asynccontextmanager
async def workers(*models: tuple[Role, LoadedModel], pool: Pool | None = None) -> AsyncIterator[Cluster]:
    """Workers with these models; asserts idleness, and that nothing was refused or retried."""
    cluster = LayoutCluster(
        models[0][1],
        CONFIG,
        ENGINE,
        RouterConfig(patience=20.0),
        roles=[role for role, _ in models],
        pool=PoolConfig(kvcache_fetch="always"),
        pool_nodes={address: pool.link(address) for address in pool.addresses} if pool is not None else None,
    )
    cluster.models = [model for _, model in models]
    async with cluster as started:
        watched = Cluster(started)
        yield watched
        await watched.idle_without_retries()


async def test_texts_are_those_of_one_process_until_a_rank_is_lost(path: Path, shared: ModelOnDevices) -> None:
    """In chunks and in batches, also from prefixes that are kept; KV cut by heads takes half the memory."""
    async with LocalCluster(shared, CONFIG, ENGINE, RouterConfig(patience=20.0)) as started:
        cluster, [worker] = Cluster(started), started.workers
        assert [plane.shape[2] for layer in worker.context.device_kv.planes for plane in layer] == [1] * 4
        assert worker.status().ranks == 2
        asked = prompts(4, shortest=30, longest=90, seed=3)
        for _ in ("computed", "from prefixes"):
            found = await asyncio.gather(*(cluster.tokens(ask(prompt, TOKENS)) for prompt in asked))
            assert found == [greedy_tiny(path, prompt, TOKENS) for prompt in asked]
        assert worker.status().counters["prefix_cache_hits"] > 0
        await cluster.idle()
        [rank] = shared.ranks.others
        os.kill(rank.process.pid, signal.SIGKILL)
        await asyncio.wait_for(worker.crashed.wait(), 60)


@pytest.mark.parametrize(("ranks", "engine"), [(1, OverlapEngine), (2, Engine)])
def test_ranks_begin_no_step_ahead_of_the_tokens_that_it_feeds(ranks: int, engine: type[Engine]) -> None:
    on_cuda: Any = SimpleNamespace(planes=[(SimpleNamespace(device=torch.device("cuda:0")),)])
    identity: Any = SimpleNamespace(ranks=ranks)
    assert engine_of(identity, on_cuda) is engine


@pytest.mark.parametrize("ranks_are", ["prefill", "decode"])
async def test_kv_is_handed_over_between_ranks_and_one_process(
    ranks_are: str, path: Path, shared: ModelOnDevices, one: LoadedModel
) -> None:
    """Prompts of one chunk and of several, at once, and one again, whose prefix the prefill worker still has."""
    prefill, decode = (shared, one) if ranks_are == "prefill" else (one, shared)
    async with workers((Role.PREFILL, prefill), (Role.DECODE, decode)) as cluster:
        asked = [*prompts(3, shortest=20, longest=90, seed=4), *prompts(1, shortest=100, longest=120, seed=5)]
        wanted = [greedy_tiny(path, prompt, TOKENS) for prompt in asked]
        assert await asyncio.gather(*(cluster.tokens(ask(prompt, TOKENS)) for prompt in asked)) == wanted
        assert await cluster.tokens(ask(asked[0], TOKENS)) == wanted[0]
        sender, receiver = cluster.cluster.workers
        assert sender.prefill.bytes_sent > 0 and sum(receiver.decode.handoffs.values()) == 5
        assert sender.identity.fingerprint == receiver.identity.fingerprint
        assert sender.identity.pairing == receiver.identity.pairing


@pytest.mark.thorough
async def test_two_groups_hand_over_to_each_other(path: Path, shared: ModelOnDevices) -> None:
    with on_devices(path) as other:
        async with workers((Role.PREFILL, shared), (Role.DECODE, other)) as cluster:
            for prompt in prompts(2, shortest=50, longest=90, seed=6):
                assert await cluster.tokens(ask(prompt, TOKENS)) == greedy_tiny(path, prompt, TOKENS)


async def test_ranks_share_the_pool_with_one_process(path: Path, shared: ModelOnDevices, one: LoadedModel) -> None:
    """What one computed another reuses, in both directions."""
    first, second = prompts(2, shortest=70, longest=90, seed=7)
    async with Pool("local", 1) as pool:
        async with workers((Role.MIXED, one), pool=pool) as alone:
            assert await served(alone, ask(first, TOKENS)) == (greedy_tiny(path, first, TOKENS), 0)
        async with workers((Role.MIXED, shared), pool=pool) as group:
            assert await served(group, ask(first, TOKENS)) == (greedy_tiny(path, first, TOKENS), reusable(first))
            assert await served(group, ask(second, TOKENS)) == (greedy_tiny(path, second, TOKENS), 0)
        async with workers((Role.MIXED, one), pool=pool) as again:
            assert await served(again, ask(second, TOKENS)) == (greedy_tiny(path, second, TOKENS), reusable(second))


def reusable(prompt: list[int]) -> int:
    return (len(prompt) - 1) // BLOCK * BLOCK


async def test_kv_that_a_lost_rank_has_is_lost_with_the_worker(path: Path, shared: ModelOnDevices) -> None:
    """Who copies it is told so, and that another worker may serve."""
    async with LocalCluster(shared, CONFIG, ENGINE, RouterConfig(patience=20.0)) as started:
        [worker] = started.workers
        [rank] = shared.ranks.others
        os.kill(rank.process.pid, signal.SIGKILL)
        device_kv = worker.context.device_kv
        for _ in range(2):
            with pytest.raises(WorkerLost, match="rank 1"):
                await asyncio.to_thread(device_kv.read, 0, device_kv.slots([0], 0, 4))
        await asyncio.wait_for(worker.crashed.wait(), 60)


def test_the_cache_is_as_large_as_the_rank_with_most_heads_has_room_for(shared: ModelOnDevices, path: Path) -> None:
    """Of three key-value heads the leader keeps one, and the other rank two."""
    specs = shared.spec.kv_layers("float32")
    assert [layer.heads for layer in most_kept(shared, specs)] == [2, 2]
    rehearsal: Any = SimpleNamespace(model=shared, specs=specs, over_one_block=print)
    locations, tokens = kv_memory(rehearsal, (), replace(ENGINE, num_kv_blocks=None, kv_cache_memory=1 << 20), "cpu")
    assert tokens == (1 << 20) // token_bytes(most_kept(shared, specs)) // BLOCK * BLOCK
    assert locations.device.num_blocks * BLOCK == tokens
