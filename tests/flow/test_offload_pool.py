"""Prompts longer than a worker's device and the KV pool: what lies in host memory is stored, and comes back there."""

from __future__ import annotations

from typing import Any

import pytest

from serving.loader.loading import LoadedModel
from serving.messages import Role
from tests.flow.conftest import Cluster
from tests.flow.offloading import ROOMY, SMALL, long_prompt
from tests.flow.test_pool import BLOCK, MIXED, SPLIT, ask, cluster, flip_a_bit_of_each, served
from tests.kvcache.pool.nodes import Cluster as Pool

pytestmark = pytest.mark.thorough

EXTENT = 128
PROMPT = long_prompt(1500)
REUSABLE = (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.fixture(params=["local", "shm"])
async def pool(request: pytest.FixtureRequest) -> Any:
    async with Pool(request.param, 1) as nodes:
        yield nodes


async def text(model: LoadedModel, pool: Pool, roles: tuple[Role, ...], engine: dict[str, Any]) -> tuple[Any, int]:
    """What new workers answer, and how many tokens of the prompt they reused."""
    async with cluster(model, pool, roles, engine) as workers:
        return await served(workers, ask(PROMPT))


def extents_of(workers: Cluster) -> int:
    """Tokens that a prompt of this length keeps in its first worker's host memory, of which the pool can be told."""
    host = workers.cluster.workers[0].kv.host
    assert host is not None
    resident = host.plan.most_resident * BLOCK
    return -(-(len(PROMPT) + 1 - resident) // EXTENT) * EXTENT


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("roles", [MIXED, SPLIT])
async def test_what_went_to_the_host_is_reused_on_another_host(
    tiny_model: LoadedModel, pool: Pool, roles: tuple[Role, ...], kernels: str
) -> None:
    small = {**SMALL, "kernels": kernels}
    async with cluster(tiny_model, pool, roles, small) as first:
        expected, cached = await served(first, ask(PROMPT))
        assert cached == 0
        on_host = extents_of(first)
    async with cluster(tiny_model, pool, roles, small) as second:
        found, cached = await served(second, ask(PROMPT))
        assert found == expected
        assert on_host - EXTENT <= cached <= on_host and cached % EXTENT == 0
        again, cached = await served(second, ask(PROMPT))
        assert again == expected and cached > 0, "it is fetched again: nothing of it is in the worker's own index"


@pytest.mark.parametrize(("first", "second"), [(ROOMY, SMALL), (SMALL, ROOMY)], ids=["from device", "from host"])
async def test_device_and_host_store_the_same(
    tiny_model: LoadedModel, pool: Pool, first: dict[str, Any], second: dict[str, Any]
) -> None:
    expected, _ = await text(tiny_model, pool, MIXED, first)
    async with cluster(tiny_model, pool, MIXED, second) as workers:
        found, cached = await served(workers, ask(PROMPT))
        assert found == expected and EXTENT <= cached <= REUSABLE
        assert cached % EXTENT == 0 or second is ROOMY


@pytest.mark.parametrize(("known", "cached"), [(100, 0), (150, 128), (700, 640)])
async def test_a_prefix_is_reused_in_whole_extents(
    tiny_model: LoadedModel, pool: Pool, known: int, cached: int
) -> None:
    """The pool has less of the prompt than would go to the host."""
    async with cluster(tiny_model, pool, MIXED, ROOMY, kvcache_store="none") as apart:
        expected, _ = await served(apart, ask(PROMPT))
    async with cluster(tiny_model, pool, MIXED, ROOMY) as first:
        await served(first, ask(PROMPT[:known], tokens=1))
    assert await text(tiny_model, pool, MIXED, SMALL) == (expected, cached)


async def test_corrupt_blocks_are_computed(tiny_model: LoadedModel, pool: Pool) -> None:
    expected, _ = await text(tiny_model, pool, MIXED, SMALL)
    assert sum(flip_a_bit_of_each(node.store) for node in pool.served)
    assert await text(tiny_model, pool, MIXED, SMALL) == (expected, 0)


async def test_long_prompts_go_on_beside_what_is_being_stored(tiny_model: LoadedModel, pool: Pool) -> None:
    """Host memory for one of them at a time: what waits to be stored gives way."""
    tight = {**SMALL, "host_kv_memory": 600 << 10}
    others = [long_prompt(980 + 10 * seed, seed=seed) for seed in range(4)]
    async with cluster(tiny_model, pool, MIXED, ROOMY, kvcache_fetch="never", kvcache_store="none") as roomy:
        expected = [(await served(roomy, ask(prompt)))[0] for prompt in others]
    async with cluster(tiny_model, pool, MIXED, tight, kvcache_bandwidth=1 << 17) as workers:
        assert [(await served(workers, ask(prompt)))[0] for prompt in others] == expected
        connector = workers.cluster.workers[0].connector
        assert connector is not None and connector.write_back.dropped > 0
