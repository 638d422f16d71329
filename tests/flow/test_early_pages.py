"""Workers have pages for their KV soon after they start, whoever asks meanwhile, and all texts are what they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.sequences import make_request
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import greedy_tiny, prompts
from tests.kvcache.memory.test_early_pages import until
from tests.serving.test_host_memory import needs_populating, resident

pytestmark = pytest.mark.thorough


@needs_populating
async def test_pages_come_beside_requests(
    make_cluster: ClusterMaker, placement: str, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.memory.early_pages.PAUSE", 0.01)
    asked = prompts(6, seed=5)
    async with make_cluster(placement, num_kv_blocks=8192) as cluster:
        pages = [worker.early_pages for worker in cluster.cluster.workers]
        for turn in ("first", "cached"):
            requests = [make_request(each, request_id=f"{turn}-{n}", max_tokens=12) for n, each in enumerate(asked)]
            texts = await asyncio.gather(*(cluster.tokens(request) for request in requests))
            assert texts == [greedy_tiny(tiny_path, prompt, 12) for prompt in asked]
            await until(lambda: all(of.bytes == sum(plane.nbytes for plane in of.planes) > 1 << 20 for of in pages))
        assert all(resident(plane.data_ptr(), plane.nbytes) for of in pages for plane in of.planes)


async def test_a_worker_that_is_asked_or_leaves_is_not_idle(make_cluster: ClusterMaker) -> None:
    async with make_cluster("embedded") as cluster:
        [worker] = cluster.cluster.workers
        assert worker.idle and worker.early_pages.idle()
        async for _ in cluster.router.generate(make_request(range(20), max_tokens=30)):
            assert not worker.early_pages.idle()
            break
        await cluster.idle()
        assert worker.early_pages.idle()
        await worker.drain(1.0)
        assert not worker.early_pages.idle()


async def test_nobody_finds_pages_for_a_worker_that_has_stopped(make_cluster: ClusterMaker) -> None:
    """It would hold the KV of a role that is over."""

    def running() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "kv-pages"]

    async with make_cluster("embedded"):
        assert running()
    assert not running()
