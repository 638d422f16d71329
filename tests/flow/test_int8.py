"""INT8 weights, and an INT8 KV cache: the same text embedded and split, with chunks of any size and reused prefixes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serving.config import ModelConfig
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load
from serving.messages import Request, SamplingParams
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import prompts

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(cpu.shared_library() is None, reason="the compiled kernels cannot be built here"),
]


@pytest.fixture(scope="module")
def model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        found = load(tiny_path, "bfloat16", quantization="int8")
        again = load(tiny_path, "bfloat16", quantization="int8")
    assert found.fingerprint == again.fingerprint != load(tiny_path, "bfloat16").fingerprint
    return found


def requests() -> list[Request]:
    return [
        Request(request_id=f"r{i}", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=30, temperature=0.0))
        for i, prompt in enumerate(prompts(6, seed=80))
    ]


@pytest.mark.parametrize("kv", ["auto", "int8"])
async def test_the_text_is_the_same_everywhere(
    make_cluster: ClusterMaker, placement: str, model: LoadedModel, kv: str
) -> None:
    config = ModelConfig(kv_cache_dtype=kv)
    async with make_cluster("embedded", model=model, model_config=config) as cluster:
        expected = [await cluster.tokens(request) for request in requests()]
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 16}
    async with make_cluster(placement, model=model, model_config=config, **settings) as cluster:
        assert await asyncio.gather(*(cluster.tokens(request) for request in requests())) == expected
        assert [await cluster.tokens(request) for request in requests()] == expected, "with prefixes reused"
