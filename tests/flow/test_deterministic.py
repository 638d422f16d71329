"""--deterministic: the same request gives the same bits whatever runs beside it, however placed, whoever goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deploy.worker import build
from serving.errors import WorkerLost
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load
from serving.messages import Delta, Request, SamplingParams
from tests.flow.conftest import Cluster, ClusterMaker
from tests.flow.reference import prompts

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(cpu.shared_library() is None, reason="the compiled kernels cannot be built here"),
]

SAMPLING = SamplingParams(max_tokens=40, temperature=0.9, seed=5, logprobs=3)
Bits = list[tuple[int, object]]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, tiny_path: Path) -> LoadedModel:
    return load(tiny_path, request.param)


def the_request() -> Request:
    return Request(request_id="one", prompt=tuple(prompts(1, shortest=150, longest=150, seed=50)[0]), sampling=SAMPLING)


def others(count: int) -> list[Request]:
    return [
        Request(request_id=f"other{i}", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=60, seed=i))
        for i, prompt in enumerate(prompts(count, seed=51))
    ]


async def bits(cluster: Cluster, request: Request) -> Bits:
    """Every token with its log-probabilities, which are compared to the last bit."""
    deltas: list[Delta] = [delta async for delta in cluster.router.generate(request)]
    return [pair for delta in deltas for pair in zip(delta.tokens, delta.logprobs, strict=True)]


@pytest.fixture
async def alone(make_cluster: ClusterMaker, model: LoadedModel) -> Bits:
    async with make_cluster("embedded", model=model, deterministic=True) as cluster:
        return await bits(cluster, the_request())


async def test_among_31_others_in_every_placement(
    make_cluster: ClusterMaker, placement: str, model: LoadedModel, alone: Bits
) -> None:
    settings = {"deterministic": True, "max_num_batched_tokens": 96, "max_num_seqs": 64}
    async with make_cluster(placement, model=model, **settings) as cluster:
        crowd = [asyncio.create_task(cluster.tokens(request)) for request in others(31)]
        found = await bits(cluster, the_request())
        await asyncio.gather(*crowd)
    assert len(found) == 40
    assert found == alone


async def test_reusing_a_prefix_changes_no_bit(make_cluster: ClusterMaker, model: LoadedModel, alone: Bits) -> None:
    async with make_cluster("split-local", model=model, deterministic=True) as cluster:
        assert await bits(cluster, the_request()) == alone
        assert await bits(cluster, the_request()) == alone


@pytest.mark.parametrize("after", [1, 10])
async def test_after_a_decode_worker_is_lost(
    make_cluster: ClusterMaker, model: LoadedModel, alone: Bits, after: int
) -> None:
    async with make_cluster("split-grpc", model=model, deterministic=True) as cluster:
        found: Bits = []
        async for delta in cluster.router.generate(the_request()):
            found += zip(delta.tokens, delta.logprobs, strict=True)
            if len(found) >= after and not cluster.seen.replacements:
                fleet = cluster.router.fleet
                holder = next(c for c in fleet.registry.candidates() if c.leases)
                fleet.suspect(holder.status.instance, WorkerLost("for the test"))
        assert cluster.seen.replacements, "the worker was meant to be lost"
    assert found == alone


async def test_without_the_kernels_it_is_refused(make_cluster: ClusterMaker, model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="--deterministic"):
        async with make_cluster("embedded", model=model, deterministic=True, kernels="torch"):
            pass


@pytest.mark.parametrize("deterministic", [True, False])
async def test_only_workers_of_the_same_kernels_go_on_with_its_texts(
    make_cluster: ClusterMaker, model: LoadedModel, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """An upgrade may bring kernels with other bits. Without the promise any will do."""

    async def told() -> tuple[str, str]:
        async with make_cluster("embedded", model=model, deterministic=deterministic) as cluster:
            identity = cluster.cluster.workers[0].identity
            return identity.pairing, identity.fingerprint

    before = await told()
    assert await told() == before
    monkeypatch.setattr(build, "sources_digest", lambda: "of the next release")
    after = await told()
    assert [one == other for one, other in zip(before, after, strict=True)] == [not deterministic] * 2
