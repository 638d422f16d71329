"""Tokens equal to transformers' greedy decoding, through every placement and transport."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serving.messages import Request, SamplingParams
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import greedy_tiny, prompts

TOKENS = 24


def request(number: int, prompt: list[int], **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Request(request_id=f"r{number}", prompt=tuple(prompt), sampling=params)


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[tuple[list[int], list[int]]]:
    return [(prompt, greedy_tiny(tiny_path, prompt, TOKENS)) for prompt in prompts(12)]


async def test_greedy_tokens_equal_transformers(
    make_cluster: ClusterMaker, placement: str, expected: list[tuple[list[int], list[int]]]
) -> None:
    async with make_cluster(placement) as cluster:
        found = await asyncio.gather(*(cluster.tokens(request(i, prompt)) for i, (prompt, _) in enumerate(expected)))
    assert found == [tokens for _, tokens in expected]


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [7, 64])
async def test_chunked_prefill_changes_nothing(
    make_cluster: ClusterMaker, placement: str, expected: list[tuple[list[int], list[int]]], budget: int
) -> None:
    async with make_cluster(placement, max_num_batched_tokens=budget, max_num_seqs=7) as cluster:
        found = await asyncio.gather(*(cluster.tokens(request(i, prompt)) for i, (prompt, _) in enumerate(expected)))
    assert found == [tokens for _, tokens in expected]


async def test_a_cached_prefix_changes_nothing_and_is_reported(
    make_cluster: ClusterMaker, placement: str, tiny_path: Path
) -> None:
    prompt = prompts(1, shortest=100, longest=100, seed=5)[0]
    expected = greedy_tiny(tiny_path, prompt, TOKENS)
    async with make_cluster(placement) as cluster:
        cached = []
        for i in range(4):
            deltas = [delta async for delta in cluster.router.generate(request(i, prompt))]
            assert [token for delta in deltas for token in delta.tokens] == expected
            cached.append(deltas[0].cached_tokens)
    assert cached[0] == 0
    assert cached[-1] == 96, "all full blocks but the last token's"


@pytest.mark.thorough
async def test_the_longer_turn_reuses_the_shorter(make_cluster: ClusterMaker, placement: str, tiny_path: Path) -> None:
    prompt = prompts(1, shortest=40, longest=40, seed=6)[0]
    async with make_cluster(placement) as cluster:
        first = await cluster.tokens(request(0, prompt))
        longer = [*prompt, *first, 9, 8, 7]
        assert await cluster.tokens(request(1, longer)) == greedy_tiny(tiny_path, longer, TOKENS)


async def test_other_tenants_share_nothing(make_cluster: ClusterMaker) -> None:
    prompt = tuple(prompts(1, shortest=64, longest=64, seed=7)[0])
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    async with make_cluster("embedded") as cluster:
        cached = []
        for tenant in ("a", "a", "b"):
            order = Request(request_id="r", prompt=prompt, sampling=sampling, tenant=tenant)
            deltas = [delta async for delta in cluster.router.generate(order)]
            cached.append(deltas[0].cached_tokens)
    assert cached == [0, 48, 0]


async def test_one_token_needs_no_decode(make_cluster: ClusterMaker, placement: str, tiny_path: Path) -> None:
    prompt = prompts(1, seed=8)[0]
    async with make_cluster(placement) as cluster:
        assert await cluster.tokens(request(0, prompt, max_tokens=1)) == greedy_tiny(tiny_path, prompt, 1)


@pytest.mark.thorough
async def test_preemption_changes_nothing(make_cluster: ClusterMaker, placement: str, tiny_path: Path) -> None:
    """A pool for about three of eight sequences: they queue, lose their blocks, and go on as if nothing happened."""
    wanted = prompts(8, shortest=30, longest=60, seed=9)
    expected = [greedy_tiny(tiny_path, prompt, 40) for prompt in wanted]
    async with make_cluster(placement, num_kv_blocks=28, block_size=8, enable_prefix_caching=False) as cluster:
        found = await asyncio.gather(
            *(cluster.tokens(request(i, prompt, max_tokens=40)) for i, prompt in enumerate(wanted))
        )
        preempted = [error for error in cluster.seen.replacements if type(error).__name__ == "Preempted"]
    assert found == expected
    assert preempted, "the pool was meant to be too small"


@pytest.mark.thorough
async def test_a_seed_gives_the_same_tokens_everywhere(make_cluster: ClusterMaker, placement: str) -> None:
    wanted = prompts(6, seed=10)
    sampled = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    async with make_cluster("embedded") as cluster:
        expected = [await cluster.tokens(request(i, prompt, seed=i, **sampled)) for i, prompt in enumerate(wanted)]
    async with make_cluster(placement) as cluster:
        found = await asyncio.gather(
            *(cluster.tokens(request(i, prompt, seed=i, **sampled)) for i, prompt in enumerate(wanted))
        )
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) == len(found)


@pytest.mark.thorough
async def test_prompt_logprobs_survive_chunks_and_the_way(make_cluster: ClusterMaker, placement: str) -> None:
    prompt = tuple(prompts(1, shortest=50, longest=50, seed=11)[0])
    order = Request(
        request_id="r",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=3, temperature=0.0, logprobs=2),
        prompt_logprobs=2,
    )
    async with make_cluster("embedded") as cluster:
        whole = [delta async for delta in cluster.router.generate(order)]
    async with make_cluster(placement, max_num_batched_tokens=16, max_num_seqs=16) as cluster:
        deltas = [delta async for delta in cluster.router.generate(order)]
    found, expected = deltas[0].prompt_logprobs, whole[0].prompt_logprobs
    assert len(found) == len(expected) == 50
    assert found[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one is not None and other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top[0][0] == other.top[0][0]
    assert [len(delta.logprobs) for delta in deltas] == [1, 1, 1]
