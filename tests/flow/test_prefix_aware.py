"""Prefix-aware placement over real workers: the router finds the worker whose KV cache holds a prompt's beginning."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvcache.blocks.prefix import extend_keys
from router.fleet import RouterConfig
from tests.fakes.sequences import make_request
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import greedy_tiny, prompts

CONFIG = RouterConfig(policy="prefix_aware", patience=20.0)


@pytest.mark.parametrize("placement", ["embedded-two", "split-local", "split-grpc"])
async def test_prompts_of_one_prefix_meet_its_blocks_and_the_text_is_exact(
    placement: str, make_cluster: ClusterMaker, tiny_path: Path
) -> None:
    shared = prompts(3, shortest=96, longest=96, seed=7)
    endings = prompts(6, shortest=5, longest=20, seed=8)
    async with make_cluster(placement, router=CONFIG) as cluster:
        for number, ending in enumerate(endings):
            prompt = shared[number % 3] + ending
            request = make_request(prompt, request_id=f"r{number}", max_tokens=6)
            assert await cluster.tokens(request) == greedy_tiny(tiny_path, prompt, 6)
        hits = sum(worker.kv.hits for worker in cluster.cluster.workers if worker.prefill is not None)
        assert hits >= 3 * 96, "the second prompt of each prefix finds all of it"


async def test_the_router_learns_what_workers_hold_and_evict(make_cluster: ClusterMaker) -> None:
    """A router that placed none of it: all it knows comes with the heartbeats."""
    first, *others = prompts(9, shortest=150, longest=160, seed=9)
    async with make_cluster("embedded-two", router=CONFIG, num_kv_blocks=24) as cluster:
        await cluster.tokens(make_request(first, request_id="a", max_tokens=2))
        index, workers = cluster.cluster.fleet.prefixes, cluster.cluster.workers
        index.retain(())
        cluster.cluster.beat()

        keys: list[bytes] = []
        extend_keys(keys, workers[0].kv.root("", long_rope=False), first[:-1], 16)
        ((holder, blocks),) = index.match(keys).items()
        assert blocks == len(keys)
        await asyncio.gather(
            *(cluster.tokens(make_request(other, request_id=f"o{n}", max_tokens=2)) for n, other in enumerate(others))
        )
        cluster.cluster.beat()
        assert index.match(keys).get(holder, 0) < len(keys), "its blocks have made room for others'"
