"""Models that alternate between layers with a window and without: their KV is handed over and pooled like any other's.

Layers with a window keep all of it: one block table and one prefix serve every layer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig, GptOssConfig, PreTrainedConfig

from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import greedy_tiny, is_greedy_tiny, prompts
from tests.flow.test_pool import BLOCK, ask, cluster, served
from tests.kvcache.pool.nodes import Cluster as Pool
from tests.serving.model.oracle import GEMMA3, GPT_OSS, VOCAB, build, save

TOKENS = 12
FAMILIES: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3TextConfig(**GEMMA3 | {"max_position_embeddings": 512}, sliding_window_pattern=2),
    "gpt_oss": GptOssConfig(**GPT_OSS | {"max_position_embeddings": 512}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(FAMILIES[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load(path, "float32")


@pytest.mark.parametrize("placement", ["embedded", "split-local", "split-grpc"])
async def test_greedy_tokens_equal_transformers(
    make_cluster: ClusterMaker, placement: str, path: Path, model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = prompts(4, vocab=VOCAB, longest=90, seed=11)
    with caplog.at_level("INFO", "serving.forward.choose"):
        async with make_cluster(placement, model=model, max_num_batched_tokens=40) as started:
            found = await asyncio.gather(*(started.tokens(ask(prompt, TOKENS)) for prompt in wanted))
    assert found == [greedy_tiny(path, prompt, TOKENS) for prompt in wanted]
    assert "computing with torch: " in caplog.text


async def test_what_one_worker_computed_another_fetches_from_the_pool(path: Path, model: LoadedModel) -> None:
    [prompt, tail] = prompts(2, vocab=VOCAB, shortest=80, longest=100, seed=12)
    async with Pool("local", 1) as pool:
        async with cluster(model, pool, (Role.PREFILL, Role.DECODE)) as first:
            tokens, cached = await served(first, ask(prompt, TOKENS))
        assert (cached, is_greedy_tiny(path, prompt, tokens)) == (0, True)
        async with cluster(model, pool, (Role.PREFILL, Role.DECODE)) as second:
            again, cached = await served(second, ask(prompt, TOKENS))
            assert (again, cached) == (tokens, (len(prompt) - 1) // BLOCK * BLOCK)
            longer = [*prompt, *tokens, *tail]
            found, _ = await served(second, ask(longer, TOKENS))
    assert is_greedy_tiny(path, longer, found)
