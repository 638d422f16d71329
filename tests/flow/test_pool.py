"""Prefixes through the KV pool: computed by one worker, used by another, and whatever the pool does, the same text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.local import LocalCluster
from deploy.worker.worker import Worker
from kvcache.pool.block import Slab
from kvcache.pool.client import PoolClient
from kvcache.pool.store import BlockStore
from router.fleet import RouterConfig
from serving.config import EngineConfig, ModelConfig, PoolConfig
from serving.loader.loading import LoadedModel
from serving.messages import Request, Role, SamplingParams
from tests.flow.conftest import Cluster
from tests.flow.reference import is_greedy_tiny, prompts
from tests.kvcache.pool.nodes import Cluster as Pool

pytestmark = pytest.mark.thorough

MIXED = (Role.MIXED,)
SPLIT = (Role.PREFILL, Role.DECODE)
BLOCK = 16


@pytest.fixture(params=["local", "grpc"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    async with Pool(request.param, 2) as nodes:
        yield nodes


@asynccontextmanager
async def cluster(
    model: LoadedModel, pool: Pool, roles: tuple[Role, ...] = MIXED, engine: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Cluster]:
    """Workers that share `pool`, new ones each time: what one finds cached it has from there."""
    started = LocalCluster(
        model,
        ModelConfig(),
        EngineConfig(**{"num_kv_blocks": 512, "block_size": BLOCK, **(engine or {})}),
        RouterConfig(patience=20.0),
        roles=roles,
        pool=PoolConfig(**{"kvcache_fetch": "always", **config}),
        pool_nodes={address: pool.link(address) for address in pool.addresses},
    )
    async with started:
        made = Cluster(started)
        yield made
        for worker in started.workers:
            assert worker.connector is not None
            if worker.connector.write_back.stores:
                await worker.connector.flush(10)
        await made.idle()


def ask(prompt: list[int], tokens: int = 12, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id="r", prompt=tuple(prompt), sampling=sampling, **fields)


async def served(workers: Cluster, request: Request) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt's were reused."""
    found: list[int] = []
    cached = 0
    async for delta in workers.router.generate(request):
        cached = max(cached, delta.cached_tokens)
        found += delta.tokens
    return found, cached


def flip_a_bit_of_each(store: BlockStore) -> int:
    """As failing memory would; how many blocks were there."""
    blocks = [record.block for record in store._tiers.ram]
    for block in blocks:
        payload = bytearray(block.payload)
        payload[len(payload) // 3] ^= 1
        object.__setattr__(block, "payload", bytes(payload))
    return len(blocks)


@pytest.mark.parametrize("roles", [MIXED, SPLIT])
async def test_what_one_worker_computed_another_reuses(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool, roles: tuple[Role, ...]
) -> None:
    [prompt, tail] = prompts(2, shortest=150, longest=180, seed=80)
    async with cluster(tiny_model, pool, roles) as first:
        tokens, cached = await served(first, ask(prompt))
        assert cached == 0
    assert is_greedy_tiny(tiny_path, prompt, tokens)
    async with cluster(tiny_model, pool, roles) as second:
        again, cached = await served(second, ask(prompt))
        assert again == tokens
        assert cached == (len(prompt) - 1) // BLOCK * BLOCK
        told = second.router.explained.explain("r")
        assert told is not None and told["attempts"][0]["cached_tokens"]["pool"] == cached, "its worker is a new one"
        longer = [*prompt, *tokens, *tail]  # a chat's next turn: outputs were stored as well
        found, cached = await served(second, ask(longer))
        assert cached >= (len(prompt) + len(tokens) - 1) // BLOCK * BLOCK - BLOCK
        assert is_greedy_tiny(tiny_path, longer, found)


async def test_tenants_share_nothing(tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=150, longest=150, seed=81)
    async with cluster(tiny_model, pool) as first:
        expected, _ = await served(first, ask(prompt, tenant="one"))
    async with cluster(tiny_model, pool) as second:
        found, cached = await served(second, ask(prompt, tenant="another"))
        assert (found, cached) == (expected, 0)
        found, cached = await served(second, ask(prompt, tenant="one"))
        assert found == expected and cached > 0


async def test_only_prompts_are_stored_when_asked_so(tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=64, longest=64, seed=82)
    async with cluster(tiny_model, pool, kvcache_store="prompts") as first:
        tokens, _ = await served(first, ask(prompt, 60))
    async with cluster(tiny_model, pool) as second:
        _, cached = await served(second, ask([*prompt, *tokens]))
        assert cached == len(prompt)


async def test_reasoning_is_not_stored(tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=64, longest=64, seed=83)
    async with cluster(tiny_model, pool, kvcache_store="none") as first:
        tokens, _ = await served(first, ask(prompt, 60))
    thought = tokens[20]
    upto = len(prompt) + tokens.index(thought)
    async with cluster(tiny_model, pool, reasoning_token_id=thought) as second:
        assert await served(second, ask(prompt, 60)) == (tokens, 0)
    async with cluster(tiny_model, pool) as third:
        _, cached = await served(third, ask([*prompt, *tokens]))
        assert cached == upto // BLOCK * BLOCK


async def test_a_bit_that_flipped_in_the_pool_costs_time_and_nothing_else(tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=150, longest=150, seed=84)
    async with cluster(tiny_model, pool) as first:
        expected, _ = await served(first, ask(prompt))
    flipped = sum(flip_a_bit_of_each(node.store) for node in pool.served)
    assert flipped
    async with cluster(tiny_model, pool) as second:
        assert await served(second, ask(prompt)) == (expected, 0)


async def test_a_pool_that_does_not_answer_costs_the_wait(
    tiny_model: LoadedModel, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prompt] = prompts(1, shortest=150, longest=150, seed=85)
    async with cluster(tiny_model, pool) as first:
        expected, _ = await served(first, ask(prompt))
    for node in pool.served:
        node.store.after = 1  # after one slab it stops
    async with cluster(tiny_model, pool, kvcache_wait=0.2) as second:
        assert (await served(second, ask(prompt)))[0] == expected
        [worker] = second.cluster.workers
        assert worker.status().counters["kvcache_timeouts"] == 1
        for node in pool.served:
            node.store.gate.set()


async def test_a_pool_that_dies_while_it_sends(tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=180, longest=180, seed=86)
    async with cluster(tiny_model, pool) as first:
        expected, _ = await served(first, ask(prompt))
    async with cluster(tiny_model, pool) as second:
        [worker] = second.cluster.workers
        assert worker.connector is not None
        kill_in_the_middle(pool, worker.connector.client)
        assert (await served(second, ask(prompt)))[0] == expected


async def test_a_client_that_leaves_while_the_prefix_comes(tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=150, longest=150, seed=87)
    async with cluster(tiny_model, pool) as first:
        expected, _ = await served(first, ask(prompt))
    for node in pool.served:
        node.store.after = 1
    async with cluster(tiny_model, pool, kvcache_wait=30.0) as second:
        [worker] = second.cluster.workers
        asking = asyncio.create_task(served(second, ask(prompt)))
        while not worker.kv.allocator.held:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for node in pool.served:
            node.store.after = None
            node.store.gate.set()
        assert (await served(second, ask(prompt)))[0] == expected


@asynccontextmanager
async def waiting_at_the_gate(
    model: LoadedModel, pool: Pool, prompt: list[int], roles: tuple[Role, ...] = MIXED, **config: Any
) -> AsyncIterator[tuple[Cluster, Worker, asyncio.Task[tuple[list[int], int]]]]:
    """Workers, the one whose step has begun on the prompt though only a first layer has come, and the asking."""
    for node in pool.served:
        node.store.gate.clear()
        node.store.after = 1
    async with cluster(model, pool, roles, **{"kvcache_wait": 30.0, "kvcache_timeout": 30.0, **config}) as workers:
        worker = workers.cluster.workers[0]
        asking = asyncio.create_task(served(workers, ask(prompt)))
        async with asyncio.timeout(60):
            while worker.engine.barrier is None:
                await asyncio.sleep(0)
        yield workers, worker, asking
        let_go(pool)


def let_go(pool: Pool) -> None:
    for node in pool.served:
        node.store.after = None
        node.store.gate.set()


def kill_in_the_middle(pool: Pool, reader: PoolClient) -> None:
    """All nodes die once the reader's next get has brought something."""
    genuine = reader.get

    async def dying(keys: Any, first_part: int = 0, last_part: int = 0, *, parts: int) -> AsyncGenerator[Slab, None]:
        sent = genuine(keys, first_part, last_part, parts=parts)
        yield await anext(sent)
        for node in pool.served:
            await node.kill()
        async for slab in sent:
            yield slab

    reader.get = dying  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("roles", [MIXED, SPLIT])
async def test_computing_begins_while_layers_still_come(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool, roles: tuple[Role, ...]
) -> None:
    [prompt, other] = prompts(2, shortest=150, longest=180, seed=91)
    async with cluster(tiny_model, pool) as first:
        await served(first, ask(prompt))
    async with waiting_at_the_gate(tiny_model, pool, prompt, roles) as (workers, worker, asking):
        assert worker.engine.stalled_seconds < 5 and not asking.done()
        found, _ = await served(workers, ask(other))  # nobody else waits for the pool, though this asks it as well
        assert is_greedy_tiny(tiny_path, other, found) and not asking.done()
        let_go(pool)
        tokens, cached = await asking
        assert is_greedy_tiny(tiny_path, prompt, tokens) and cached == (len(prompt) - 1) // BLOCK * BLOCK
        assert worker.status().counters["external_prefix_cache_hits"] == cached


async def test_a_pool_that_stalls_while_the_step_waits(tiny_path: Path, tiny_model: LoadedModel, pool: Pool) -> None:
    [prompt] = prompts(1, shortest=150, longest=150, seed=92)
    async with cluster(tiny_model, pool) as first:
        await served(first, ask(prompt))
    async with waiting_at_the_gate(tiny_model, pool, prompt, kvcache_wait=0.5) as (_, worker, asking):
        tokens, cached = await asking
        assert is_greedy_tiny(tiny_path, prompt, tokens) and cached == 0
        counters = worker.status().counters
        assert counters["kvcache_timeouts"] == 1 and counters["external_prefix_cache_hits"] == 0
        assert 0 < counters["engine_kv_wait_seconds"] < counters["engine_forward_seconds"]


@pytest.mark.parametrize("roles", [MIXED, SPLIT])
async def test_a_pool_that_dies_while_the_step_waits(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool, roles: tuple[Role, ...]
) -> None:
    [prompt] = prompts(1, shortest=180, longest=180, seed=93)
    async with cluster(tiny_model, pool) as first:
        await served(first, ask(prompt))
    async with waiting_at_the_gate(tiny_model, pool, prompt, roles) as (_, _, asking):
        for node in pool.served:
            await node.kill()
        tokens, _ = await asking
        assert is_greedy_tiny(tiny_path, prompt, tokens)


@pytest.mark.parametrize("roles", [MIXED, SPLIT])
async def test_a_client_that_leaves_while_the_step_waits(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool, roles: tuple[Role, ...]
) -> None:
    [prompt] = prompts(1, shortest=150, longest=150, seed=94)
    async with cluster(tiny_model, pool) as first:
        await served(first, ask(prompt))
    async with waiting_at_the_gate(tiny_model, pool, prompt, roles) as (workers, worker, asking):
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await workers.idle()
        assert worker.kv.allocator.held == 0 and worker.engine.barrier is None, "while the pool still stalls"
        let_go(pool)
        assert is_greedy_tiny(tiny_path, prompt, (await served(workers, ask(prompt)))[0])


async def test_a_full_worker_does_not_wait_for_its_own_stores(
    tiny_path: Path, tiny_model: LoadedModel, pool: Pool
) -> None:
    """Blocks held for the pool are few, so requests that need nearly all of a small worker's blocks still run."""
    wanted = prompts(6, shortest=180, longest=200, seed=88)
    async with cluster(tiny_model, pool, engine={"num_kv_blocks": 16}) as small:
        found = await asyncio.gather(*(served(small, ask(prompt)) for prompt in wanted))
    for prompt, (tokens, _) in zip(wanted, found, strict=True):
        assert is_greedy_tiny(tiny_path, prompt, tokens)


async def test_storing_that_breaks_holds_nothing(tiny_model: LoadedModel, pool: Pool) -> None:
    prompt, another = prompts(2, shortest=150, longest=150, seed=91)

    async def broken(blocks: Any) -> None:
        raise RuntimeError("a bug")

    async with cluster(tiny_model, pool) as workers:
        [worker] = workers.cluster.workers
        assert worker.connector is not None
        worker.connector.write_back.writer.put = broken  # type: ignore[method-assign]
        for number, asked in enumerate((prompt, another), 1):
            await served(workers, ask(asked))
            while sum(worker.restarts.values()) < number:
                await asyncio.sleep(0.001)
            await workers.idle()
