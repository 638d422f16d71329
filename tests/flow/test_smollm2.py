"""SmolLM2-135M-Instruct for real: greedy tokens identical to transformers in fp32, embedded and split."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx
import pytest

from serving.checkpoint.hub import resolve
from serving.text.tokenizer import load_tokenizer
from tests.flow.reference import is_greedy
from tests.flow.server import MillraceServer
from tests.flow.test_hangup import stream
from tests.serving.model.oracle import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.real]

TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5,",
    "Translate to German: Good morning, my friend.\n",
    "The chemical formula of water is",
    "Q: What is the tallest mountain on Earth?\nA:",
    "SELECT name, age FROM users WHERE",
    "To make a cup of tea, first",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "In 1969, Neil Armstrong",
    "import numpy as np\n\nx = np.",
    "Roses are red, violets are",
    "List five fruits:\n1.",
    "Il était une fois",
    "A haiku about rain:\n",
    "The derivative of x^2 is",
    "人工知能とは",
    "Breaking news: scientists have discovered 🪐 " + "and discovered again " * 60,
]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve(None)
    except ValueError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def greedy_by_transformers(path: Path) -> Callable[[tuple[int, ...], tuple[int, ...]], bool]:
    """Whether `transformers` gives these tokens after the prompt. It is asked once for each text."""
    model = smollm2(path)
    return cache(lambda prompt, tokens: is_greedy(model, prompt, tokens))


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ((), ("mixed-0",)),
        (("--prefill", "1", "--decode", "1"), ("prefill-0", "decode-0")),
    ],
    ids=["embedded", "split"],
)
async def test_greedy_tokens_are_those_of_transformers(
    path: Path,
    greedy_by_transformers: Callable[[tuple[int, ...], tuple[int, ...]], bool],
    arguments: tuple[str, ...],
    workers: tuple[str, ...],
) -> None:
    assert len(PROMPTS) == 20
    tokenizer = load_tokenizer(path)
    wanted = [tokenizer.encode(text) for text in PROMPTS]
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--max-num-batched-tokens", "128")
    with MillraceServer(*flags, *arguments, workers=workers) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            found = await asyncio.gather(*(stream(client, prompt, TOKENS, None, ignore_eos=True) for prompt in wanted))
        await asyncio.to_thread(server.wait_idle)
    for text, prompt, tokens in zip(PROMPTS, wanted, found, strict=True):
        assert len(tokens) == TOKENS, text
        assert greedy_by_transformers(tuple(prompt), tuple(tokens)), text
