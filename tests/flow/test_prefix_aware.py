"""Prefix-aware placement over real workers: the router finds the worker whose KV cache holds a prompt's beginning."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.blocks.prefix import extend_keys
from router.fleet import Fleet, RouterConfig
from router.placer import Placer
from router.policies import make_policy
from router.router import Router
from router.snapshot import packed, parts, restore
from tests.fakes.sequences import make_request
from tests.flow.conftest import Cluster, ClusterMaker
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


async def test_a_router_that_begins_again_knows_what_workers_hold(make_cluster: ClusterMaker, tiny_path: Path) -> None:
    """Workers are asked for no more than what came since."""
    shared, tail = prompts(2, shortest=96, longest=96, seed=10)
    async with make_cluster("embedded-two", router=CONFIG) as cluster:
        local = cluster.cluster
        await cluster.tokens(make_request(shared + tail, request_id="a", max_tokens=4))
        local.beat()
        kept, names = packed(parts(local.placer)), {worker.identity.instance for worker in local.workers}
        fleet = Fleet(replace(CONFIG, name="again"), local._link)
        placer = Placer(fleet, make_policy(CONFIG.policy))
        assert restore(placer, kept).workers == 2 and fleet.prefixes is not None
        for worker in local.workers:
            since = fleet.kv_events_since(worker.identity.instance)
            assert since == local.fleet.kv_events_since(worker.identity.instance) and since is not None
            fleet.heartbeat(worker.status(), worker.kv_events(since))
        again = Cluster(local)
        again.router = Router(placer, again.seen)
        prompt = shared + tail[:50]
        request = make_request(prompt, request_id="b", max_tokens=4)
        assert await again.tokens(request) == greedy_tiny(tiny_path, prompt, 4)
        told = again.router.explained.explain("b")
        assert told is not None and told["attempts"][0]["cached_tokens"]["expected"] == 144
        assert told["attempts"][0]["cached_tokens"]["actual"] == 144 and set(fleet.registry.workers) == names
        await fleet.close()
