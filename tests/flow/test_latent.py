"""The latent KV of MLA goes the way of any other: handed over, stored in the pool, fetched by another worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import DeepseekV3Config

from serving.loader.loading import LoadedModel, load
from serving.messages import Role
from tests.flow.conftest import ClusterMaker
from tests.flow.reference import greedy_tiny, is_greedy_tiny, prompts
from tests.flow.test_pool import BLOCK, ask, cluster, served
from tests.kvcache.pool.nodes import Cluster as Pool
from tests.serving.model.oracle import DEEPSEEK, GROUPS, VOCAB, YARN_MLA, build, save

TOKENS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DEEPSEEK | GROUPS | {"max_position_embeddings": 512, "q_lora_rank": 24, "rope_parameters": YARN_MLA}
    return save(build(DeepseekV3Config(**config)), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load(path, "float32")


@pytest.mark.parametrize("placement", ["embedded", "split-local", "split-grpc"])
async def test_greedy_tokens_equal_transformers(
    make_cluster: ClusterMaker, placement: str, path: Path, model: LoadedModel
) -> None:
    wanted = prompts(4, vocab=VOCAB, longest=90, seed=11)
    async with make_cluster(placement, model=model, max_num_batched_tokens=40) as started:
        found = await asyncio.gather(*(started.tokens(ask(prompt, TOKENS)) for prompt in wanted))
    assert found == [greedy_tiny(path, prompt, TOKENS) for prompt in wanted]


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
