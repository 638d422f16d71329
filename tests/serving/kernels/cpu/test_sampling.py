"""The kernels' draws and log-probabilities: torch's choices, whatever the order of the values and the threads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.kernels import cpu
from serving.messages import SamplingParams
from serving.sampling.cpu_sampling import CpuSampling
from serving.sampling.randomness import uniforms
from serving.sampling.sampler import SampleRow
from serving.sampling.torch_sampling import TorchSampling, token_weights

BORDER = 2e-6  # of all probability: how near to one a draw may fall on its other side


def random_row(choice: random.Random, vocab: int) -> SampleRow:
    params = SamplingParams(
        max_tokens=100,
        seed=choice.getrandbits(64),
        temperature=choice.choice([0.0, 0.2, 0.7, 1.0, 1.0, 1.5, 5.0]),
        top_p=choice.choice([1.0, 1.0, 0.95, 0.9, 0.5, 0.03, 0.9999]),
        top_k=choice.choice([0, 0, 1, 40, 1000, 5000, vocab - 1]),
        min_p=choice.choice([0.0, 0.0, 0.01, 0.1]),
        repetition_penalty=choice.choice([1.0, 1.0, 1.2]),
        presence_penalty=choice.choice([0.0, 0.0, 0.3]),
        frequency_penalty=choice.choice([0.0, 0.0, -0.2]),
        logit_bias=choice.choice([(), (), ((0, 2.5), (vocab - 1, -3.0))]),
        min_tokens=choice.choice([0, 0, 10]),
    )
    output = [choice.randrange(vocab) for _ in range(6)]
    return SampleRow(params, choice.getrandbits(40), output, (choice.randrange(vocab),), (vocab // 2,))


def random_logits(choice: random.Random, count: int, vocab: int) -> Tensor:
    """Spread little or much, with ties as bfloat16 makes them, in some order, and some masked."""
    generator = torch.Generator().manual_seed(choice.getrandbits(32))
    logits = torch.randn(count, vocab, generator=generator) * choice.choice([0.5, 2.5, 4.0, 10.0])
    kind = choice.randrange(5)
    if kind == 0:
        logits = logits.bfloat16().float()
    elif kind == 1:
        logits = logits.sort(dim=-1, descending=choice.random() < 0.5).values
    elif kind == 2:
        logits = logits.round()
    elif kind == 3:
        logits[:, ::3] = float("-inf")
    return logits


def between(logits: Tensor, row: SampleRow, one: int, other: int) -> float:
    """How far the draw was from the border between two tokens, as a share of all that may be drawn."""
    weights = token_weights(logits[None], logits.max()[None], [row])[0]
    cumulative = weights.cumsum(0) / weights.sum()
    number = float(uniforms([row.params.seed], [row.position])[0])
    return float((cumulative[min(one, other) : max(one, other)] - number).abs().max())


@pytest.mark.parametrize("vocab", [2, 17, 256, 1003, 49_152], ids=str)
def test_tokens_are_those_of_torch(kernels: cpu.Kernels, vocab: int) -> None:
    choice = random.Random(vocab)
    for _ in range(4 if vocab > 10_000 else 40):
        logits = random_logits(choice, 20, vocab)
        rows = [random_row(choice, vocab) for _ in range(20)]
        assert CpuSampling(kernels).sample(logits, rows) == TorchSampling().sample(logits, rows)


def test_a_draw_that_torch_makes_otherwise_fell_on_a_border(kernels: cpu.Kernels) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 20_000, generator=generator)
    rows = [SampleRow(SamplingParams(max_tokens=9, seed=3), position, (), (1,)) for position in range(3000)]
    found = CpuSampling(kernels).sample(logits.expand(3000, -1), rows)
    weights = token_weights(logits, logits.amax(dim=-1), rows[:1])[0].cumsum(0)
    numbers = torch.from_numpy(uniforms([3] * 3000, range(3000))) * weights[-1]
    expected = torch.searchsorted(weights, numbers, right=True).tolist()
    different = [i for i in range(3000) if found[i] != expected[i]]
    assert len(different) <= 10  # twenty thousand borders that lie some 1e-8 apart from torch's
    for i in different:
        assert between(logits[0], rows[i], found[i], expected[i]) < BORDER


def test_draws_are_as_frequent_as_probable(kernels: cpu.Kernels) -> None:
    draws, vocab = 20_000, 700
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 0.7
    rows = [SampleRow(SamplingParams(max_tokens=9, seed=17), position, (), (1,)) for position in range(draws)]
    counts = np.bincount(CpuSampling(kernels).sample(logits.expand(draws, -1), rows), minlength=vocab)
    expected = logits.double().softmax(-1).numpy() * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 699 + 4 * (2 * 699) ** 0.5  # mean and four deviations of that many degrees of freedom


def test_the_uniform_numbers_are_those_of_the_engine(kernels: cpu.Kernels) -> None:
    """Among 2^k tokens of equal weight, and their sums exact, the token is the number's leading bits."""
    choice = random.Random(1)
    vocab = 2**15
    rows = [
        SampleRow(SamplingParams(max_tokens=9, seed=choice.getrandbits(64)), choice.getrandbits(64), (), (1,))
        for _ in range(200)
    ]
    found = CpuSampling(kernels).sample(torch.zeros(1, vocab).expand(200, -1), rows)
    numbers = uniforms([row.params.seed for row in rows], [row.position for row in rows])
    assert found == [int(number * vocab) for number in numbers]


@pytest.mark.parametrize("order", ["rising", "falling", "up and down", "equal", "two values", "alternating"])
def test_no_order_of_values_is_too_hard(kernels: cpu.Kernels, order: str) -> None:
    vocab = 20_011
    rising = torch.linspace(-9, 0, vocab)
    logits = {
        "rising": rising,
        "falling": rising.flip(0),
        "up and down": -(torch.arange(vocab) - vocab // 2).abs() / 1000,
        "equal": torch.full((vocab,), 3.0),
        "two values": (torch.arange(vocab) % 7 == 0).float(),
        "alternating": rising * (1 - 2 * (torch.arange(vocab) % 2)),
    }[order].float()
    filters = [{"top_k": 1}, {"top_k": 4999}, {"top_p": 0.901}, {"min_p": 0.03}, {"top_k": 9000, "top_p": 0.37}]
    rows = [
        SampleRow(SamplingParams(max_tokens=9, seed=seed, **params), 7, (), (1,))  # type: ignore[arg-type]
        for seed, params in enumerate(filters * 4)
    ]
    logits = logits.expand(len(rows), -1)
    assert CpuSampling(kernels).sample(logits, rows) == TorchSampling().sample(logits, rows)


def test_rows_share_nothing(kernels: cpu.Kernels) -> None:
    """Alone, among others in any order, and on any number of threads: the same tokens and log-probabilities."""
    choice = random.Random(8)
    logits = random_logits(choice, 40, 5003)
    logits[7, 5], logits[8, 6], logits[9] = float("nan"), float("inf"), float("-inf")
    rows = [random_row(choice, 5003) for _ in range(40)]
    backend = CpuSampling(kernels)
    together = backend.sample(logits, rows)
    assert together[7:10] == [-1, -1, -2]
    assert [backend.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)] == together
    assert backend.sample(logits.flip(0), rows[::-1]) == together[::-1]
    assert backend.sample(logits.t().contiguous().t(), rows) == together
    good = logits[10:]
    scored = backend.logprobs(good, together[10:], 5)
    assert [backend.logprobs(good[i : i + 1], [together[10 + i]], 5)[0] for i in range(30)] == scored
    one_thread = cpu.load(threads=1, form=kernels.form)
    assert one_thread is not None
    assert CpuSampling(one_thread).sample(logits, rows) == together
    assert CpuSampling(one_thread).logprobs(good, together[10:], 5) == scored
    one_thread.close()


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (17, 17), (1003, 0), (1003, 7), (1003, 400), (49_152, 5)])
def test_logprobs_are_those_of_torch(kernels: cpu.Kernels, vocab: int, k: int) -> None:
    choice = random.Random(vocab)
    for _ in range(6):
        logits = random_logits(choice, 10, vocab)
        logits[:, 0] = 1.0  # something is not masked
        chosen = [choice.randrange(vocab) for _ in range(10)]
        found = CpuSampling(kernels).logprobs(logits, chosen, k)
        expected = TorchSampling().logprobs(logits, chosen, k)
        for one, other in zip(found, expected, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            values = [one.logprob, *(value for _, value in one.top)]
            assert values == pytest.approx([other.logprob, *(value for _, value in other.top)], abs=2e-5)
