"""A float prefill worker for decode workers that keep INT8 KV: the text of INT8 at both ends, through every path.

It computes their prompts over INT8 in its own blocks, which hold floats for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from decode.worker import DecodeWorker
from kvcache.pool.links import PoolLink
from serving.checkpoint.hub import resolve
from serving.config import PoolConfig
from serving.loader.loading import LoadedModel, load
from serving.messages import LeaseGrant, LeaseOrder, Request, SamplingParams
from tests.flow.conftest import Cluster
from tests.flow.reference import prompts
from tests.flow.test_offload_split import SMALL, long_prompt, moved
from tests.flow.test_unequal import End, bytes_sent, request, split, texts
from tests.kvcache.pool.nodes import Cluster as Pool

pytestmark = pytest.mark.thorough

INT8 = End("int8")


@pytest.fixture(scope="module")
def narrow_model(tiny_path: Path) -> LoadedModel:
    return load(tiny_path, "bfloat16")


@pytest.fixture(params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tiny_model: LoadedModel, narrow_model: LoadedModel) -> LoadedModel:
    return tiny_model if request.param == "float32" else narrow_model


@pytest.mark.parametrize("remote", [False, True], ids=["local", "grpc"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_the_text_is_that_of_int8_at_both_ends(model: LoadedModel, kernels: str, remote: bool) -> None:
    asked = prompts(16, seed=61)
    engine = {"kernels": kernels}

    async def answers(cluster: Cluster) -> list[list[int]]:
        """torch's bfloat16 has other last bits in another batch, and a tie may fall otherwise: there one at a time."""
        if kernels == "torch":
            return [text for one in asked for text in await texts(cluster, [one])]
        return await texts(cluster, asked)

    async with split(model, End("int8", engine=engine), End("int8", engine=engine)) as cluster:
        expected = await answers(cluster)
        whole = bytes_sent(cluster)
    prefill, decode = End(engine=engine), End("int8", block_size=32, engine=engine)
    async with split(model, prefill, decode, remote=remote) as cluster:
        assert await answers(cluster) == expected
        assert bytes_sent(cluster) == whole, "KV travels as the decode worker keeps it"
        assert await answers(cluster) == expected, "with prefixes reused at both ends"
        assert bytes_sent(cluster) < 2 * whole


async def test_smollm2_too() -> None:
    try:
        model = load(resolve(None), "bfloat16")
    except ValueError as missing:
        pytest.skip(str(missing))
    engine = {"num_kv_blocks": 256, "max_num_batched_tokens": 256}
    asked = prompts(20, vocab=49_000, shortest=20, longest=120, seed=77)
    async with split(model, End("int8", engine=engine), End("int8", engine=engine)) as cluster:
        expected = await texts(cluster, asked)
    async with split(model, End(engine=engine), End("int8", engine=engine), remote=True) as cluster:
        assert await texts(cluster, asked) == expected


async def test_blocks_go_from_one_kind_to_the_other(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats and INT8 side by side in one step, and one after the other in the same few blocks."""
    asked = prompts(40, seed=62)
    expected = {}
    for kv in ("auto", "int8"):
        async with split(model, End(kv), End(kv)) as cluster:
            expected[kv] = await texts(cluster, asked)
    differ = sum(one != other for one, other in zip(expected["auto"], expected["int8"], strict=True))
    assert differ > 4, "else no mistake would show"
    kept: dict[str, str] = {}
    open_lease = DecodeWorker.open

    def noted(worker: DecodeWorker, order: LeaseOrder, session: str) -> LeaseGrant:
        grant = open_lease(worker, order, session)
        kept[order.request.request_id] = grant.kv_dtype
        return grant

    monkeypatch.setattr(DecodeWorker, "open", noted)
    few = {"num_kv_blocks": 40}
    async with split(model, End(engine=few), End(), INT8) as cluster:
        for _ in range(2):
            found = await asyncio.gather(*(cluster.tokens(named(n, prompt)) for n, prompt in enumerate(asked)))
            assert len(set(kept.values())) == 2
            for number, tokens in enumerate(found):
                kv = "int8" if kept[str(number)] == "int8" else "auto"
                assert tokens == expected[kv][number]
        assert cluster.cluster.workers[0].kv.allocator.evictions > 40


def named(number: int, prompt: Sequence[int]) -> Request:
    plain = request(prompt)
    return Request(request_id=str(number), prompt=plain.prompt, sampling=plain.sampling)


@pytest.mark.parametrize(("first", "second"), [("auto", "int8"), ("int8", "auto")])
async def test_the_kv_pool_takes_them_for_an_int8_workers(model: LoadedModel, first: str, second: str) -> None:
    """What a float worker computed for INT8 an INT8 one reuses, and the other way round; floats are not mixed in."""
    asked = prompts(6, shortest=100, longest=180, seed=63)
    async with Pool("local", 1) as nodes:
        pool = {"pool": PoolConfig(kvcache_fetch="always"), "pool_nodes": links(nodes)}
        async with split(model, End(), End(), **pool) as cluster:
            await texts(cluster, asked)
            assert fetched(cluster) == 0
        async with split(model, End(first), INT8, **pool) as cluster:
            expected = await texts(cluster, asked)
            assert fetched(cluster) == 0, "keys of floats and of INT8 are not the same"
        async with split(model, End(second), INT8, **pool) as cluster:
            assert await texts(cluster, asked) == expected
            assert fetched(cluster) == sum((len(prompt) - 1) // 16 * 16 for prompt in asked)


def links(nodes: Pool) -> dict[str, PoolLink]:
    return {address: nodes.link(address) for address in nodes.addresses}


def fetched(cluster: Cluster) -> int:
    """Tokens the prefill worker had from the KV pool."""
    connector = cluster.cluster.workers[0].connector
    assert connector is not None
    return connector.prefixes.stats.hits


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_prompts_longer_than_the_device(model: LoadedModel, kernels: str) -> None:
    """Earlier chunks wait in host memory, as INT8 in extents made for floats."""
    prompt = long_prompt(1100, seed=6)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    long = Request(request_id="long", prompt=tuple(prompt), sampling=params)
    roomy = {"num_kv_blocks": 512, "max_num_batched_tokens": 200, "kernels": kernels}
    small = {**SMALL, "kernels": kernels}
    async with split(model, End("int8", engine=small), End("int8", engine=roomy)) as cluster:
        expected = await cluster.tokens(long)
    async with Pool("local", 1) as nodes:
        shared = {"pool": PoolConfig(kvcache_fetch="always"), "pool_nodes": links(nodes)}
        for reused in (0, 640):
            async with split(model, End(engine=small), End("int8", engine=roomy), **shared) as cluster:
                assert await cluster.tokens(long) == expected
                assert fetched(cluster) == reused, "from host memory to host memory"
                assert reused or moved(cluster, 0) >= 1100 - 704
