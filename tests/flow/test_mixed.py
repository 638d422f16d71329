"""Mixed workers compute the prompts of their own leases, even on their way out: none waits for another's blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.local import LocalCluster
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig
from serving.loader.loading import LoadedModel
from serving.messages import Prefilled, PrefillOrder, Request, Role, SamplingParams
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.remote import RemoteCluster

pytestmark = pytest.mark.thorough

TOKENS = 24


def request(name: int, prompt: list[int], tokens: int = TOKENS) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return Request(request_id=f"r{name}", prompt=tuple(prompt), sampling=sampling)


class Watched:
    """A mixed worker that notes for whose leases it is asked to prefill, and is told to leave with the `last`-th."""

    def __init__(self, worker: Worker, last: int | None = None):
        self.worker = worker
        self.last = last
        self.asked_for: list[str] = []  # instances of the leases' workers
        self.requests: list[str] = []
        self.leaving: asyncio.Task[None] | None = None
        self._run = worker.prefill.run
        worker.prefill.run = self.run  # type: ignore[method-assign]

    async def run(self, order: PrefillOrder) -> AsyncIterator[Prefilled]:
        if order.grant is not None:  # else a last token is drawn, for which no lease waits
            self.asked_for.append(order.grant.lease.instance)
            self.requests.append(order.order.request.request_id)
        if len(self.asked_for) == self.last:
            self.leaving = asyncio.create_task(self.worker.drain(20.0))
            while not self.worker.draining:
                await asyncio.sleep(0)
        async for prefilled in self._run(order):
            yield prefilled


@asynccontextmanager
async def mixed(
    model: LoadedModel, kind: type[LocalCluster], workers: int, last: int, **engine: int | bool
) -> AsyncIterator[tuple[Cluster, list[Watched]]]:
    """So many mixed workers, the first of which is told to leave with the `last`-th prompt it is asked for."""
    config = EngineConfig(**{"num_kv_blocks": 256, **engine})
    roles = [Role.MIXED] * workers
    async with kind(model, ModelConfig(), config, RouterConfig(patience=20.0), roles=roles) as started:
        watched = [Watched(worker, None if i else last) for i, worker in enumerate(started.workers)]
        cluster = Cluster(started)
        yield cluster, watched
        leaving = watched[0].leaving
        assert leaving is not None, "it was meant to be told to leave"
        async with asyncio.timeout(60):
            await leaving
        await cluster.idle()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [LocalCluster, RemoteCluster])
async def test_a_worker_told_to_leave_finishes_the_prompts_it_holds_leases_for(
    tiny_model: LoadedModel, tiny_path: Path, kind: type[LocalCluster], workers: int
) -> None:
    """It is told between the grant of the lease and the prefill: nobody else need compute it, nothing is retried."""
    prompt = prompts(1, shortest=60, longest=60, seed=70)[0]
    async with mixed(tiny_model, kind, workers, last=1) as (cluster, watched):
        assert await cluster.tokens(request(0, prompt)) == greedy_tiny(tiny_path, prompt, TOKENS)
        assert cluster.seen.replacements == []
        assert watched[0].asked_for == [watched[0].worker.identity.instance]


async def test_mixed_workers_do_not_wait_for_each_other(tiny_model: LoadedModel, tiny_path: Path) -> None:
    """Pools for about three texts, far more asked for, and one of two workers leaves amidst it.

    Were each to compute prompts for leases at the other, all blocks of both might be held by leases that wait for a
    prefill at the other, which waits for blocks.
    """
    wanted = prompts(12, shortest=30, longest=60, seed=71)
    expected = [greedy_tiny(tiny_path, prompt, TOKENS) for prompt in wanted]
    small = {"num_kv_blocks": 28, "block_size": 8, "enable_prefix_caching": False}
    async with mixed(tiny_model, LocalCluster, 2, last=4, **small) as (cluster, watched):
        async with asyncio.timeout(60):
            asked = (cluster.tokens(request(i, prompt)) for i, prompt in enumerate(wanted))
            assert await asyncio.gather(*asked) == expected
        for one in watched:
            assert one.asked_for and {*one.asked_for} == {one.worker.identity.instance}


class MixedAndDecode(LocalCluster):
    """A mixed worker with few blocks, which computes all prompts, and a decode worker with room for few texts."""

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        blocks, texts = (24, 64) if role is Role.MIXED else (128, 4)
        self.engine_config = EngineConfig(num_kv_blocks=blocks, max_num_seqs=texts, enable_prefix_caching=False)
        return super()._worker(role, number, dialer)


async def test_a_prompt_for_anothers_lease_goes_before_new_leases(tiny_model: LoadedModel, tiny_path: Path) -> None:
    """It needs nearly all blocks of the only worker that can compute it, which could always fill them with its own."""
    long = prompts(1, shortest=360, longest=360, seed=72)[0]
    short = prompts(16, shortest=40, longest=40, seed=73)
    roles = [Role.MIXED, Role.DECODE]
    kind = MixedAndDecode(tiny_model, ModelConfig(), EngineConfig(), RouterConfig(patience=60.0), roles=roles)
    async with kind as started:
        cluster = Cluster(started)
        mixed = Watched(started.workers[0])
        over = asyncio.Event()

        async def ask_again(number: int, prompt: list[int]) -> None:
            """Texts of unlike lengths, so that never many of them end at once."""
            for i in range(100):
                if not over.is_set():
                    await cluster.tokens(request(number, prompt, 20 + (7 * number + 11 * i) % 40))

        busy = [asyncio.create_task(ask_again(i, prompt)) for i, prompt in enumerate(short)]
        async with asyncio.timeout(60):
            while started.workers[0].kv.allocator.available > 12:
                await asyncio.sleep(0)
        found: list[int] = []
        async for delta in cluster.router.generate(request(99, long)):
            if not found:
                passed_by = len(mixed.asked_for) - 1 - mixed.requests.index("r99")
            found += delta.tokens
        over.set()
        await asyncio.gather(*busy)
        assert found == greedy_tiny(tiny_path, long, TOKENS)
        assert passed_by <= len(short), "only what was under way may be computed before it"
        await cluster.idle()
