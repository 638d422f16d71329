"""Rows of a batch: none sees who else is in it, none costs calls of its own, and their histories can be rebuilt."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from serving.grammar.grammars import Allowed
from serving.messages import SamplingParams
from serving.sampling.allowed import best_allowed
from serving.sampling.penalties import PenaltyState
from serving.sampling.sampler import Sampled, Sampler, SampleRow, SamplingBackend
from serving.sampling.torch_sampling import TorchSampling, token_weights


def varied_row(index: int, vocab: int) -> SampleRow:
    """A row whose features depend on `index`: greedy, sampled, filtered, edited and all kinds of mixtures."""
    choice = random.Random(index)
    params = SamplingParams(
        max_tokens=100,
        seed=choice.getrandbits(64),
        temperature=choice.choice([0.0, 0.6, 1.0, 1.7]),
        top_p=choice.choice([1.0, 0.95, 0.5]),
        top_k=choice.choice([0, 0, 40, 5000]),
        min_p=choice.choice([0.0, 0.0, 0.01]),
        repetition_penalty=choice.choice([1.0, 1.0, 1.2]),
        presence_penalty=choice.choice([0.0, 0.0, 0.3]),
        logit_bias=choice.choice([(), ((7, 2.5), (vocab - 1, -3.0))]),
        min_tokens=choice.choice([0, 0, 10]),
        logprobs=choice.choice([None, None, 0, 5]),
    )
    history = [choice.randrange(vocab) for _ in range(8)]
    return SampleRow(params, choice.randrange(4000), tuple(history[:5]), tuple(history[5:]), (2,))


@pytest.mark.parametrize("vocab", [7, 257, 1003, 40_007], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16 values"])
@pytest.mark.thorough
def test_a_row_gives_the_same_bits_alone_and_among_others(sampler: Sampler, vocab: int, dtype: torch.dtype) -> None:
    count = 24
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(count, vocab, generator=generator) * 3).to(dtype).float()
    rows = [varied_row(index, vocab) for index in range(count)]
    together = sampler(logits, rows)
    order = list(range(count))
    random.Random(vocab).shuffle(order)
    shuffled = sampler(logits[order], [rows[index] for index in order])
    pairs = [sampler(logits[i : i + 2], rows[i : i + 2]) for i in range(0, count, 2)]
    for index in range(count):
        (alone,) = sampler(logits[index : index + 1], [rows[index]])
        assert alone == together[index]
        assert alone == shuffled[order.index(index)]
        assert alone == pairs[index // 2][index % 2]


@pytest.mark.parametrize("vocab", [257, 40_007], ids=str)
def test_a_rows_probabilities_have_the_same_bits_alone_and_among_others(vocab: int) -> None:
    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    rows = [varied_row(index, vocab) for index in range(100)]
    rows = [row for row in rows if not row.greedy][:12]
    peaks = logits.amax(dim=-1)
    together = token_weights(logits, peaks, rows)
    for index in range(12):
        one = slice(index, index + 1)
        assert torch.equal(token_weights(logits[one], peaks[one], rows[one])[0], together[index])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_torch_threads_changes_no_bit(sampler: Sampler, threads: int) -> None:
    logits = torch.randn(6, 40_007, generator=torch.Generator().manual_seed(1)) * 3
    rows = [varied_row(index, 40_007) for index in range(6)]
    expected = sampler(logits, rows)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert sampler(logits, rows) == expected
    finally:
        torch.set_num_threads(before)


class CountedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the torch operations called while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls(count: int, **params: Any) -> list[str]:
    rows = [SampleRow(SamplingParams(max_tokens=9, seed=i, **params), 3, (), (1,)) for i in range(count)]
    logits = torch.randn(count, 300, generator=torch.Generator().manual_seed(0))
    counted = CountedCalls()
    with counted:
        Sampler(TorchSampling())(logits, rows)
    return counted.names


def test_a_greedy_batch_is_one_look_for_the_maximum() -> None:
    names = calls(32, temperature=0.0)
    assert [name for name in names if "max" in name] == ["aten.max.dim"]
    assert len(names) < 10


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.8, "logprobs": 5},
    ],
    ids=str,
)
def test_more_rows_take_no_more_calls(params: dict[str, Any]) -> None:
    assert calls(2, **params) == calls(32, **params)


VOCAB = 20
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@settings(deadline=None)
@given(prompt=tokens, output=tokens, split=st.integers(0, 30))
def test_a_rebuilt_history_is_the_one_counted_step_by_step(prompt: list[int], output: list[int], split: int) -> None:
    rebuilt, appended, taken_over = (PenaltyState(prompt, VOCAB) for _ in range(3))
    rebuilt.follow(output)
    for count in range(1, len(output) + 1):
        appended.follow(output[:count])
    taken_over.follow(output[:split])
    taken_over.follow(output)
    for state in (appended, taken_over):
        assert torch.equal(state.counts, rebuilt.counts)
        assert torch.equal(state.seen, rebuilt.seen)
        assert state.length == rebuilt.length == len(output)
    assert rebuilt.counts.tolist() == [output.count(token) for token in range(VOCAB)]
    assert rebuilt.seen.tolist() == [token in prompt or token in output for token in range(VOCAB)]


def generate(
    sampler: Sampler, logits: torch.Tensor, params: SamplingParams, *, keep_state: bool, take_over_at: int = -1
) -> list[int]:
    """Forty tokens, each step's logits a row of `logits`; the state is lost and built again at `take_over_at`."""
    prompt, output = (3, 3, 5), list[int]()
    state = PenaltyState(prompt, logits.shape[1]) if keep_state else None
    for step in range(40):
        if step == take_over_at:
            state = PenaltyState(prompt, logits.shape[1])
            state.follow(output)
        row = SampleRow(params, len(prompt) + step, tuple(output), prompt, (), state)
        (result,) = sampler(logits[step : step + 1], [row])
        output.append(result.token)  # type: ignore[union-attr]
    return output


def test_penalised_text_goes_on_exactly_after_a_takeover(sampler: Sampler) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(
        max_tokens=99, seed=8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    )
    expected = generate(sampler, logits, params, keep_state=False)
    assert generate(sampler, logits, params, keep_state=True) == expected
    assert generate(sampler, logits, params, keep_state=True, take_over_at=17) == expected
    neutral = SamplingParams(max_tokens=99, seed=8, top_p=0.9)
    assert generate(sampler, logits, neutral, keep_state=False) != expected


def allowing(*tokens: int, vocab: int = 12) -> Allowed:
    bits = np.zeros((vocab + 31) // 32 * 32, dtype=np.bool_)
    bits[list(tokens)] = True
    return Allowed(np.packbits(bits, bitorder="little"), set(tokens) <= {0})


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12),
    tokens=st.sets(st.integers(0, 11), min_size=1),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 100),
)
def test_what_a_grammar_allows_is_drawn_as_if_there_were_nothing_else(
    sampler: Sampler, logits: list[float], tokens: set[int], temperature: float, seed: int
) -> None:
    """And the rows beside it are drawn as ever."""
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=seed, logprobs=1)
    free = SampleRow(params, 3, (), (1,))
    held = replace(free, allowed=allowing(*tokens))
    minus_inf = [value if token in tokens else float("-inf") for token, value in enumerate(logits)]
    alone, expected = sampler(torch.tensor([logits, minus_inf]), [free, free])
    beside, found = sampler(torch.tensor([logits, logits]), [free, held])
    assert isinstance(found, Sampled) and isinstance(expected, Sampled) and found.token == expected.token
    assert beside == alone
    whole = torch.tensor(logits).log_softmax(0)
    assert found.logprob is not None  # of what the model said, not of what was left of it
    assert found.logprob.logprob == pytest.approx(float(whole[found.token]), abs=1e-4)


@settings(deadline=None)
@given(
    logits=st.lists(st.sampled_from([-1.5, 0.0, 2.0, np.nan, np.inf, -np.inf]), min_size=12, max_size=12),
    tokens=st.sets(st.integers(0, 11)),
)
def test_the_best_allowed_token_is_the_one_that_is_sampled(
    backend: SamplingBackend, logits: list[float], tokens: set[int]
) -> None:
    """Also of logits that are no numbers: a request's token, or its error, is not another's beside it."""
    row = SampleRow(SamplingParams(max_tokens=9, temperature=0.0), 3, (), (1,), allowed=allowing(*tokens))
    (expected,) = backend.sample(torch.tensor([logits]), [row])
    assert best_allowed(torch.tensor(logits), allowing(*tokens)) == max(expected, -1)


def test_where_a_grammar_ends_min_tokens_does_not_hold(sampler: Sampler) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=5)
    row = SampleRow(params, 3, (), (1,), eos_token_ids=(0,), allowed=allowing(0))
    (found,) = sampler(torch.zeros(1, 12), [row])
    assert isinstance(found, Sampled) and found.token == 0
    (found,) = sampler(torch.zeros(1, 12), [replace(row, allowed=allowing(0, 3))])
    assert isinstance(found, Sampled) and found.token == 3
    row = replace(row, params=replace(params, stop_token_ids=(3, 4, 999, -1)))
    for tokens, drawn in (((3,), {3}), ((0, 3, 4), {0}), ((3, 5), {5})):  # a form that only a stop token goes on with
        (found,) = sampler(torch.zeros(1, 12), [replace(row, allowed=allowing(*tokens))])
        assert isinstance(found, Sampled) and found.token in drawn
