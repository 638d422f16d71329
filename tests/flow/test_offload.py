"""Prompts longer than the device's KV: the same text as with room for all of it, and nothing left on the host."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serving.checkpoint.hub import resolve
from serving.config import ModelConfig
from serving.errors import ContextLengthExceeded
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load
from serving.messages import Request
from serving.text.tokenizer import load_tokenizer
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.offloading import DEVICE_TOKENS, SMALL, asked, long_prompt, moved
from tests.flow.reference import is_greedy_tiny, prompts

pytestmark = pytest.mark.thorough

KERNELS = [
    pytest.param("torch", id="torch"),
    pytest.param(
        "compiled",
        id="compiled",
        marks=pytest.mark.skipif(cpu.shared_library() is None, reason="the compiled kernels cannot be built here"),
    ),
]


async def scored(cluster: Cluster, request: Request) -> list[tuple[int, float]]:
    """Each token with its log-probability, to the last bit."""
    found = [delta async for delta in cluster.router.generate(request)]
    return [(token, one.logprob) for delta in found for token, one in zip(delta.tokens, delta.logprobs, strict=True)]


@pytest.mark.parametrize("kernels", KERNELS)
async def test_a_long_prompt_gives_the_text_it_gives_with_room(
    make_cluster: ClusterMaker, tiny_model: LoadedModel, kernels: str
) -> None:
    prompt = long_prompt(1500)
    request = asked("long", prompt, 24, logprobs=0)
    async with make_cluster("embedded", kernels=kernels) as cluster:
        expected = await scored(cluster, request)
    async with make_cluster("embedded", kernels=kernels, **SMALL) as cluster:
        found = await scored(cluster, request)
        assert moved(cluster) >= 1500 - DEVICE_TOKENS, "the device held it all"
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert is_greedy_tiny(tiny_model.path, prompt, [token for token, _ in found])
    if kernels == "compiled":
        assert found == expected, "scores differ in some bit"


@pytest.mark.parametrize("kernels", KERNELS)
async def test_others_run_beside_it_and_are_not_disturbed(make_cluster: ClusterMaker, kernels: str) -> None:
    requests = [asked(f"r{i}", prompt, 20) for i, prompt in enumerate(prompts(6, seed=81, longest=150))]
    requests[2:2] = [asked("long", long_prompt(900), 20), asked("longer", long_prompt(1100, seed=6), 20)]
    requests.append(asked("one", long_prompt(800, seed=7), 1))  # which takes no lease
    async with make_cluster("embedded", kernels=kernels) as cluster:
        expected = [await cluster.tokens(request) for request in requests]
    async with make_cluster("embedded", kernels=kernels, **SMALL) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in requests)) == expected
        assert moved(cluster) > 0


@pytest.mark.parametrize("where", ["embedded", "split-local"])
async def test_a_text_that_outgrows_the_device_goes_on(make_cluster: ClusterMaker, where: str) -> None:
    request = asked("growing", long_prompt(690), 60)
    async with make_cluster("embedded") as cluster:
        expected = await cluster.tokens(request)
    async with make_cluster(where, **SMALL) as cluster:
        assert await cluster.tokens(request) == expected
        assert [type(error).__name__ for error in cluster.seen.replacements] == ["Preempted"]
        assert sum(moved(cluster, number) for number in range(len(cluster.cluster.workers))) > 0


async def test_an_8_bit_cache_and_scored_prompts_are_offloaded_likewise(make_cluster: ClusterMaker) -> None:
    config = ModelConfig(kv_cache_dtype="int8")
    request = replace(asked("r", long_prompt(1200), 10), prompt_logprobs=0)
    found = []
    for settings in ({}, {**SMALL, "host_kv_memory": 1 << 20}):
        async with make_cluster("embedded", model_config=config, **settings) as cluster:
            deltas = [delta async for delta in cluster.router.generate(request)]
            scores = [one for delta in deltas for one in delta.prompt_logprobs]
            assert len(scores) == 1200
            found.append([token for delta in deltas for token in delta.tokens])
    assert found[0] == found[1]


async def test_hanging_up_frees_the_host(make_cluster: ClusterMaker) -> None:
    async with make_cluster("embedded", **SMALL) as cluster:
        host = cluster.cluster.workers[0].context.locations.host
        moving, loop = asyncio.Event(), asyncio.get_running_loop()
        copy = host.move
        host.move = lambda moves: (copy(moves), loop.call_soon_threadsafe(moving.set))
        for tokens in (0, 3):
            stream = cluster.router.generate(asked(f"r{tokens}", long_prompt(1300), 400))
            waiting = asyncio.ensure_future(anext(stream))
            if tokens:
                await waiting
                for _ in range(tokens):
                    await anext(stream)
            else:
                await moving.wait()
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await stream.aclose()  # type: ignore[attr-defined]
            await cluster.idle()
        (audit,) = [audit for audit in await cluster.router.audit() if "host_extents" in audit.counts]
        assert audit.counts["host_extents"] == 0 == audit.leaked["host_extents"]


async def test_what_fits_neither_is_refused(make_cluster: ClusterMaker) -> None:
    async with make_cluster("embedded", **{**SMALL, "host_kv_memory": 1 << 20}) as cluster:
        limit = cluster.cluster.workers[0].identity.max_model_len
        assert DEVICE_TOKENS < limit < 2048
        with pytest.raises(ContextLengthExceeded, match=str(limit)):
            await cluster.tokens(asked("r", long_prompt(limit), 4))


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(cpu.shared_library() is None, reason="the compiled kernels cannot be built here")
async def test_smollm2_reads_3000_tokens_with_device_kv_for_750(make_cluster: ClusterMaker) -> None:
    try:
        path = resolve(None)
    except ValueError as missing:
        pytest.skip(str(missing))
    text = " ".join(f"On day {n} the mill ground {n * 37 % 101} sacks of {('rye', 'oats')[n % 2]}." for n in range(250))
    prompt = load_tokenizer(path).encode(text)[:3000]
    assert len(prompt) == 3000
    model, request = load(path), asked("long", prompt, 32, ignore_eos=True)
    roomy, small = {"num_kv_blocks": 200}, {"num_kv_blocks": 750 // 16, "host_kv_memory": 128 << 20}
    found = []
    for settings in (roomy, small):  # tests/flow/test_offload_split.py does the same with workers apart
        async with make_cluster("embedded", model=model, **settings) as cluster:
            found.append(await cluster.tokens(request))
            assert settings is roomy or moved(cluster) >= 2250
            assert cluster.seen.replacements == []
    assert found[0] == found[1]
