"""Drafting changes no token: greedy or sampled, alone or in a batch, embedded or split, with tokens to spare."""

from __future__ import annotations

import asyncio

import pytest

from serving.messages import Request, SamplingParams
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import prompts

pytestmark = pytest.mark.thorough

LETTERS = tuple((token, 100.0) for token in (20, 21, 22))  # three tokens far above the rest: much repeats


def requests(count: int, **sampling: object) -> list[Request]:
    params = {"max_tokens": 50, "logit_bias": LETTERS, **sampling}
    return [
        Request(request_id=f"r{i}", prompt=tuple(prompt), sampling=SamplingParams(**{**params, "seed": i}))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts(count, seed=70))
    ]


def accepted(cluster: Cluster) -> int:
    found = [worker.status().counters.get("spec_decode_num_accepted_tokens", 0.0) for worker in cluster.cluster.workers]
    return int(sum(found))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 1}])
async def test_the_tokens_are_the_same(make_cluster: ClusterMaker, placement: str, sampling: dict[str, object]) -> None:
    wanted = requests(5, **sampling)
    async with make_cluster("embedded", num_speculative_tokens=0) as cluster:
        expected = [await cluster.tokens(request) for request in wanted]
        assert accepted(cluster) == 0
    async with make_cluster(placement, num_speculative_tokens=5) as cluster:
        alone = await cluster.tokens(wanted[0])
        together = await asyncio.gather(*(cluster.tokens(request) for request in wanted))
        assert accepted(cluster) > 0, "something was meant to be drafted right"
    assert alone == expected[0]
    assert together == expected


async def test_a_stop_token_among_right_drafts_ends_the_text(make_cluster: ClusterMaker) -> None:
    wanted = requests(6, temperature=0.8, stop_token_ids=(22,))
    async with make_cluster("embedded", num_speculative_tokens=0) as cluster:
        expected = [await cluster.tokens(request) for request in wanted]
    async with make_cluster("embedded", num_speculative_tokens=8) as cluster:
        assert [await cluster.tokens(request) for request in wanted] == expected
    assert any(len(tokens) < 50 for tokens in expected)


async def test_drafting_stops_at_the_end_of_the_context_and_of_the_pool(make_cluster: ClusterMaker) -> None:
    """Sequences that fill the whole pool: no draft may need a block, or a position, that is not there."""
    wanted = requests(3, temperature=0.0, max_tokens=400)
    for speculative in (0, 8):
        async with make_cluster(
            "embedded", num_kv_blocks=20, block_size=8, num_speculative_tokens=speculative
        ) as cluster:
            short = [request for request in wanted if len(request.prompt) < 150]
            found = [await cluster.tokens(request) for request in short]
            if speculative == 0:
                expected = found
    assert found == expected
    assert all(len(request.prompt) + len(tokens) == 160 for request, tokens in zip(short, found, strict=True))
