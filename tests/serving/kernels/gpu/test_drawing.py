"""Draws without sorts: the tokens that torch draws, whatever the filters, the order of the logits, ties and batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.kernels.gpu import drawing, radix_search
from serving.messages import SamplingParams
from serving.sampling import torch_sampling, triton_sampling
from serving.sampling.sampler import SampleRow

# No top-p ends between two of equal tokens, where the sums of float64 decide.
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9011},
    {"top_p": 0.5037},
    {"top_p": 1e-9},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.7013},
    {"top_k": 7, "min_p": 0.3},
    {"top_p": 0.8017, "min_p": 0.05},
    {"top_k": 12, "top_p": 0.9503, "min_p": 0.01},
]


def rows_of(choice: random.Random, count: int) -> list[SampleRow]:
    """Every filter in turn, from some one on, at some temperature."""
    first = choice.randrange(len(FILTERS))
    return [
        SampleRow(
            SamplingParams(
                max_tokens=9,
                seed=choice.getrandbits(64),
                temperature=choice.choice([0.05, 0.7, 1.0, 1.5, 5.0]),
                **FILTERS[(first + number) % len(FILTERS)],
            ),
            position=choice.getrandbits(40),
            output_tokens=(),
            prompt_tokens=(),
        )
        for number in range(count)
    ]


def logits_of(choice: random.Random, kind: str, count: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(choice.getrandbits(32))
    logits = torch.randn(count, vocab, generator=generator) * choice.choice([0.5, 2.5, 10.0])
    if kind == "of bfloat16":  # ties
        return logits.bfloat16().float()
    if kind == "few values":
        return logits.round()
    if kind == "sorted":
        return logits.sort(dim=-1, descending=choice.random() < 0.5).values
    if kind == "masked":
        logits[:, 1::3] = float("-inf")
    return torch.zeros(count, vocab) if kind == "equal" else logits


def drawn(module: Any, logits: Tensor, rows: list[SampleRow], device: torch.device) -> list[int]:
    logits = logits.to(device)
    tokens: list[int] = module.draw(logits, logits.amax(dim=-1), rows).tolist()
    return tokens


KINDS = ("plain", "of bfloat16", "few values", "sorted", "masked", "equal")


@pytest.mark.parametrize(("vocab", "seed"), [(2, 0), (67, 1), (601, 2), (601, 3)])
def test_tokens_are_those_of_torch(vocab: int, seed: int, device: torch.device) -> None:
    choice = random.Random(seed)
    logits = torch.cat([logits_of(choice, kind, 1, vocab) for kind in KINDS])
    rows = rows_of(choice, len(KINDS))
    assert drawn(triton_sampling, logits, rows, device) == drawn(torch_sampling, logits, rows, torch.device("cpu"))


def test_of_equal_logits_the_lowest_ids_are_kept(device: torch.device) -> None:
    """The bin of the last kept token lies among better ones: those after it must be drawn no less and no more often."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)).round().expand(14, -1).contiguous()
    rows = [
        SampleRow(SamplingParams(max_tokens=9, seed=n, temperature=2.0, top_k=13 + n % 2), n, (), ()) for n in range(14)
    ]
    assert drawn(triton_sampling, logits, rows, device) == drawn(torch_sampling, logits, rows, torch.device("cpu"))


def test_many_programs_share_a_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties of the last kept token lie in several tiles."""
    for module, name, size in ((radix_search, "TILE", 64), (radix_search, "CHUNK", 16), (drawing, "TILE", 64)):
        monkeypatch.setattr(module, name, size)
    choice = random.Random(1)
    logits = logits_of(choice, "few values", 3, 200)
    rows = [
        SampleRow(SamplingParams(max_tokens=9, seed=n, **asked), position=5, output_tokens=(), prompt_tokens=())
        for n, asked in enumerate(({"top_k": 60}, {"top_p": 0.8017}, {"temperature": 2.0}))
    ]
    assert drawn(triton_sampling, logits, rows, device) == drawn(torch_sampling, logits, rows, torch.device("cpu"))


def test_a_top_p_of_zero_keeps_the_best(device: torch.device) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(6))
    rows = [SampleRow(SamplingParams(max_tokens=9, seed=n, top_p=0.0, top_k=k), n, (), ()) for n, k in ((1, 0), (2, 5))]
    assert drawn(triton_sampling, logits, rows, device) == logits.argmax(dim=-1).tolist()


def test_a_row_is_drawn_alike_alone_and_beside_others(device: torch.device) -> None:
    choice = random.Random(4)
    logits, rows = logits_of(choice, "of bfloat16", 3, 100), rows_of(choice, 3)
    logits[1, 7], logits[2] = float("nan"), float("-inf")
    together = drawn(triton_sampling, logits, rows, device)
    assert drawn(triton_sampling, logits[:1], rows[:1], device) == together[:1]
    assert all(0 <= token < 100 for token in together), "what cannot be drawn names a token, too: an embedding is read"


def test_vocabularies_beyond_the_kernels_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "LARGEST_VOCABULARY", 99)
    choice = random.Random(5)
    logits, rows = logits_of(choice, "plain", 2, 100), rows_of(choice, 2)
    cpu = torch.device("cpu")
    assert drawn(triton_sampling, logits, rows, cpu) == drawn(torch_sampling, logits, rows, cpu)
