"""A worker whose ranks keep their heads' KV each on a device of its own: one process's text, nothing held afterwards,
and an end when a rank is lost. The devices are CPUs here (tests.serving.rank_group.test_device_group).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deploy.local import LocalCluster
from deploy.worker.build import WorkerLinks, build_worker, engine_of
from deploy.worker.model_cache import release
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.engine.engine import Engine
from serving.engine.overlap import OverlapEngine
from serving.errors import StaleLease
from serving.messages import LeaseGrant, LeaseId, Role
from serving.parallel.layout import ParallelLayout
from serving.rank_group.device_leader import ModelOnDevices, load_on_devices
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_pool import ask
from tests.tiny import tiny_llama

TOKENS = 12
CONFIG = ModelConfig(dtype="float32", tensor_parallel_size=2)
ENGINE = EngineConfig(num_kv_blocks=48, max_num_batched_tokens=40, max_num_seqs=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=2, hidden=48, heads=6, kv_heads=3)


@pytest.fixture
def shared(path: Path) -> Iterator[ModelOnDevices]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_on_devices(path, "float32", ParallelLayout(tensor=2), 20.0, "cpu")
    try:
        yield model
    finally:
        release(model)
        torch.set_num_threads(threads)


async def test_texts_are_those_of_one_process_until_a_rank_is_lost(path: Path, shared: ModelOnDevices) -> None:
    """In chunks and in batches, also from prefixes that are kept; KV cut by heads takes half the memory."""
    async with LocalCluster(shared, CONFIG, ENGINE, RouterConfig(patience=20.0)) as started:
        cluster, [worker] = Cluster(started), started.workers
        assert [layer.heads for layer in worker.context.locations.device.specs] == [1, 1]
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


async def test_it_hands_no_kv_over(shared: ModelOnDevices, path: Path) -> None:
    async with LocalCluster(shared, CONFIG, ENGINE, RouterConfig(patience=20.0)) as started:
        [worker] = started.workers
        assert worker.connector is None
        lease = LeaseId(lease="a", epoch=0, instance="another")
        grant = LeaseGrant(lease=lease, cached_tokens=0, address="local:another", kv_dtype="float32", transports=())
        with pytest.raises(StaleLease, match="is not handed over"):
            worker.prefill.dialer.dial(grant)
        alone = identity_of(shared)
        assert worker.identity.fingerprint == alone[0] and worker.identity.pairing != alone[1]


def identity_of(shared: ModelOnDevices) -> tuple[str, str]:
    """Fingerprint and pairing of a worker of one rank of the same model."""
    from deploy.worker.build import layout_fingerprint
    from serving.grammar.grammars import GRAMMAR_VERSION

    specs = shared.spec.kv_layers("float32")
    return (
        layout_fingerprint(shared.fingerprint, specs, "any"),
        layout_fingerprint(shared.fingerprint, (), "any" + GRAMMAR_VERSION),
    )


def test_a_worker_that_would_hand_kv_over_is_not_built(shared: ModelOnDevices) -> None:
    with pytest.raises(ValueError, match="each GPU keeps the KV of its heads, and a decode worker"):
        build_worker(
            Role.DECODE,
            shared,
            replace(CONFIG, device="cuda"),
            ENGINE,
            WorkerLinks(address="local:decode", dialer=None),  # type: ignore[arg-type]
        )
