"""Prefixes straight from the pool to the decode worker: fewer bytes handed over, and always the same text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.blocks.prefix import extend_keys
from kvcache.memory.device import token_bytes
from kvcache.pool.block import Slab
from serving.errors import CorruptChunk
from serving.loader.loading import LoadedModel
from tests.flow.conftest import Cluster
from tests.flow.reference import greedy_tiny, prompts
from tests.flow.test_pool import BLOCK, SPLIT, ask, cluster, kill_in_the_middle, let_go, pool, served
from tests.kvcache.pool.nodes import Cluster as Pool

pytestmark = pytest.mark.thorough

__all__ = ["pool"]  # the fixture: nodes in this process, reached directly or over gRPC

PROMPT = prompts(1, shortest=170, longest=170, seed=95)[0]
PREFIX = (len(PROMPT) - 1) // BLOCK * BLOCK


class Split(Cluster):
    """A prefill and a decode worker, and what they tell."""

    def __init__(self, made: Cluster):
        self.__dict__ = made.__dict__
        self.prefill, self.decode = self.cluster.workers

    def count(self, name: str) -> float:
        return self.decode.status().counters[name]

    def sent(self) -> float:
        """Tokens' worth of KV that was handed over."""
        assert self.prefill.prefill is not None
        return self.prefill.prefill.bytes_sent / token_bytes(self.prefill.context.device_kv.specs)


@asynccontextmanager
async def split(model: LoadedModel, pool: Pool, **config: Any) -> AsyncIterator[Split]:
    """Workers that know of the prompt what the pool does, and use it."""
    async with cluster(model, pool) as first:
        await served(first, ask(PROMPT))
    async with cluster(model, pool, SPLIT, **{"kvcache_direct": "always", **config}) as made:
        yield Split(made)


def harm(workers: Split, pool: Pool, index: int) -> None:
    """From now on this block of the prompt leaves the pool with a bit flipped."""
    keys: list[bytes] = []
    extend_keys(keys, workers.decode.kv.root("", False), PROMPT, BLOCK, upto=PREFIX)
    for node in pool.served:
        genuine = node.store.read

        def harmed(
            asked: Sequence[bytes], first: int, last: int, genuine: Callable[..., Iterator[Slab]] = genuine
        ) -> Iterator[Slab]:
            for slab in genuine(asked, first, last):
                payload = bytearray(slab.payload)
                for place, number in enumerate(slab.indices):
                    if asked[number] == keys[index]:
                        payload[sum(slab.sizes[:place])] ^= 1
                yield replace(slab, payload=bytes(payload))

        node.store.read = harmed  # type: ignore[method-assign]


async def test_only_what_follows_the_prefix_is_handed_over(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool
) -> None:
    expected = greedy_tiny(tiny_path, PROMPT, 12)
    async with split(tiny_model, pool) as workers:
        assert await served(workers, ask(PROMPT)) == (expected, PREFIX)
        assert workers.sent() == len(PROMPT) - PREFIX
        assert workers.count("kvcache_direct_tokens") == PREFIX and not workers.count("kvcache_direct_fallbacks")
        assert (await served(workers, ask(PROMPT, tenant="another")))[0] == expected
        assert workers.count("kvcache_direct_tokens") == PREFIX, "tenants share nothing"
    async with split(tiny_model, pool, kvcache_direct="never") as workers:
        assert await served(workers, ask(PROMPT)) == (expected, PREFIX)
        assert workers.sent() == len(PROMPT) and not workers.count("kvcache_direct_tokens")


async def test_what_came_corrupt_is_handed_over_after_all(tiny_path: Path, tiny_model: LoadedModel, pool: Pool) -> None:
    async with split(tiny_model, pool) as workers:
        harm(workers, pool, 3)
        assert (await served(workers, ask(PROMPT)))[0] == greedy_tiny(tiny_path, PROMPT, 12)
        assert workers.count("kvcache_corrupt") >= 1 and workers.count("kvcache_direct_fallbacks") == 1
        assert workers.count("kvcache_direct_tokens") == 3 * BLOCK
        assert workers.sent() == len(PROMPT) - 3 * BLOCK


async def test_a_pool_that_dies_while_it_sends_to_both(tiny_path: Path, tiny_model: LoadedModel, pool: Pool) -> None:
    async with split(tiny_model, pool) as workers:
        assert workers.decode.connector is not None
        kill_in_the_middle(pool, workers.decode.connector.client)
        assert (await served(workers, ask(PROMPT)))[0] == greedy_tiny(tiny_path, PROMPT, 12)
        assert workers.count("kvcache_direct_tokens") + workers.sent() == len(PROMPT)


async def test_a_pool_that_stalls_costs_the_wait(tiny_path: Path, tiny_model: LoadedModel, pool: Pool) -> None:
    async with split(tiny_model, pool, kvcache_wait=0.3) as workers:
        for node in pool.served:
            node.store.gate.clear()
            node.store.after = 1
        assert (await served(workers, ask(PROMPT)))[0] == greedy_tiny(tiny_path, PROMPT, 12)
        assert workers.count("kvcache_direct_fallbacks") == 1
        assert workers.count("kvcache_direct_tokens") + workers.sent() == len(PROMPT)
        let_go(pool)


@pytest.mark.parametrize("how", ["leaves", "begins anew"])
async def test_while_the_pool_stalls_a_lease_may_end_or_begin_anew(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool, how: str
) -> None:
    async with split(tiny_model, pool, kvcache_wait=30.0, kvcache_timeout=30.0) as workers:
        decode = workers.decode.decode
        assert decode is not None and workers.prefill.connector is not None
        workers.prefill.connector.fetches = False  # it computes what the decode worker waits for
        for node in pool.served:
            node.store.gate.clear()
            node.store.after = 1
        genuine, tries = decode.receive, 0

        async def refused(chunk: Any, via: str = "local") -> None:
            nonlocal tries
            tries += 1
            if how == "begins anew" and tries == 1:
                let_go(pool)
                raise CorruptChunk("harmed on its way", code="digest")
            await genuine(chunk, via)

        decode.receive = refused  # type: ignore[method-assign]
        asking = asyncio.create_task(served(workers, ask(PROMPT)))
        async with asyncio.timeout(60):
            while not tries:
                await asyncio.sleep(0)
        if how == "leaves":
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await workers.idle()
            assert workers.decode.audit_now().idle, "while the pool still stalls"
            let_go(pool)
            asking = asyncio.create_task(served(workers, ask(PROMPT)))
        assert (await asking)[0] == greedy_tiny(tiny_path, PROMPT, 12)
        assert workers.sent() >= len(PROMPT) - PREFIX
        assert workers.count("kvcache_direct_tokens") == PREFIX
