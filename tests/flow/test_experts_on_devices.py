"""Workers whose ranks hold some experts each, and keep their heads' KV on a device of their own: one process's text in
every role, and KV handed over to and from one process. The devices are CPUs here, as in test_ranks_on_devices.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deploy.local import LocalCluster
from deploy.worker.model_cache import release
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from serving.parallel.layout import ParallelLayout
from serving.rank_group.device_leader import ModelOnDevices, load_on_devices
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_pool import ask
from tests.flow.test_unequal_layouts import LayoutCluster
from tests.serving.model.oracle import VOCAB, build, configs, save

TOKENS = 12
CONFIG = ModelConfig(dtype="float32", data_parallel_size=2, enable_expert_parallel=True)
ENGINE = EngineConfig(num_kv_blocks=48, block_size=8, max_num_batched_tokens=40, max_num_seqs=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("model"))


@pytest.fixture
def spread(path: Path) -> Iterator[ModelOnDevices]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layout = ParallelLayout(sequence=2, spread_experts=True)
    model = load_on_devices(path, "float32", layout, 20.0, "cpu")
    yield model
    release(model)
    torch.set_num_threads(threads)


def asked(count: int, seed: int) -> list[list[int]]:
    return prompts(count, vocab=VOCAB, shortest=20, longest=90, seed=seed)


async def test_texts_are_those_of_one_process_until_a_rank_is_lost(path: Path, spread: ModelOnDevices) -> None:
    """In chunks and in batches, of more sequences than ranks and of one, also from prefixes that are kept."""
    async with LocalCluster(spread, CONFIG, ENGINE, RouterConfig(patience=20.0)) as started:
        cluster, [worker] = Cluster(started), started.workers
        assert worker.status().ranks == 2
        several = asked(4, seed=3)
        for _ in ("computed", "from prefixes"):
            found = await asyncio.gather(*(cluster.tokens(ask(prompt, TOKENS)) for prompt in several))
            assert found == [greedy_tiny(path, prompt, TOKENS) for prompt in several]
        counters = worker.status().counters
        assert counters["prefix_cache_hits"] > 0 and counters["parallel_bytes"] > 0
        await cluster.idle()
        [rank] = spread.ranks.others
        os.kill(rank.process.pid, signal.SIGKILL)
        await asyncio.wait_for(worker.crashed.wait(), 60)


@pytest.mark.parametrize("ranks_are", ["prefill", "decode"])
async def test_kv_is_handed_over_between_ranks_and_one_process(
    ranks_are: str, path: Path, spread: ModelOnDevices
) -> None:
    one: LoadedModel = load(path, "float32")
    first, second = (spread, one) if ranks_are == "prefill" else (one, spread)
    roles = [Role.PREFILL, Role.DECODE]
    cluster = LayoutCluster(spread, CONFIG, ENGINE, RouterConfig(patience=20.0), roles=roles)
    cluster.models = [first, second]
    async with cluster as started:
        watched, several = Cluster(started), asked(3, seed=4)
        found = await asyncio.gather(*(watched.tokens(ask(prompt, TOKENS)) for prompt in several))
        assert found == [greedy_tiny(path, prompt, TOKENS) for prompt in several]
        sender, receiver = started.workers
        assert sender.identity.fingerprint == receiver.identity.fingerprint
        assert sum(receiver.decode.handoffs.values()) == 3
        await watched.idle_without_retries()
