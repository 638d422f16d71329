"""The sampler's choices: equal to the slow oracle's, distributed as they should be, and clear when there is none."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.errors import InternalError
from serving.messages import SamplingParams
from serving.sampling import torch_sampling as by_torch
from serving.sampling.sampler import Sampled, Sampler, SampleRow, SamplingBackend, SamplingFailed
from serving.sampling.torch_sampling import token_weights
from tests.serving.sampling import sampling_oracle as oracle

VOCAB = 12


def make_row(
    *,
    position: int = 5,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (1,),
    eos: tuple[int, ...] = (),
    **params: Any,
) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=100, **params), position, output, prompt, eos)


def sample(sampler: Sampler, logits: list[list[float]], *rows: SampleRow) -> list[Sampled | SamplingFailed]:
    return sampler(torch.tensor(logits, dtype=torch.float32), rows)


def token_of(sampler: Sampler, logits: list[float], row: SampleRow) -> int:
    (result,) = sample(sampler, [logits], row)
    assert isinstance(result, Sampled)
    return result.token


tokens_strategy = st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple)

# Quarters, so that equal logits are common; a few rows with wider spread.
logits_strategy = st.lists(
    st.one_of(st.integers(-8, 12).map(lambda n: n / 4), st.floats(-20, 20, width=32)), min_size=VOCAB, max_size=VOCAB
)


@st.composite
def rows_strategy(draw: st.DrawFn) -> SampleRow:
    return make_row(
        position=draw(st.integers(0, 2**20)),
        output=draw(tokens_strategy),
        prompt=draw(tokens_strategy.filter(bool)),
        eos=draw(st.sampled_from([(), (0,), (0, 3)])),
        seed=draw(st.integers(0, 2**64 - 1)),
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.03])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, VOCAB, VOCAB + 1])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.sampled_from([(), ((2, 3.0),), ((0, -100.0), (4, 1.5))])),
        min_tokens=draw(st.sampled_from([0, 3])),
        stop_token_ids=draw(st.sampled_from([(), (7,)])),
    )


@settings(deadline=None)
@given(cases=st.lists(st.tuples(logits_strategy, rows_strategy()), min_size=1, max_size=6))
def test_every_row_is_the_oracles_choice(
    sampler: Sampler, border: float, cases: list[tuple[list[float], SampleRow]]
) -> None:
    expected = [oracle.token(logits, row) for logits, row in cases]
    assume(all(margin > border for _, margin in expected))
    results = sample(sampler, [logits for logits, _ in cases], *(row for _, row in cases))
    assert results == [Sampled(token) for token, _ in expected]


@pytest.mark.parametrize("candidates", [3, 4096], ids=["a few candidates first", "all at once"])
@settings(deadline=None)
@given(cases=st.lists(st.tuples(logits_strategy, rows_strategy()), min_size=1, max_size=6))
def test_the_filters_keep_the_oracles_tokens(candidates: int, cases: list[tuple[list[float], SampleRow]]) -> None:
    cases = [(logits, row) for logits, row in cases if not row.greedy]
    assume(cases)
    expected = []
    for values, row in cases:
        ids, margin = oracle.kept(oracle.tempered(values, row.params.temperature), row)
        assume(margin > 1e-9)
        expected.append(sorted(ids))
    logits = torch.tensor([values for values, _ in cases], dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_torch, "CANDIDATES", candidates)
        weights = token_weights(logits, logits.amax(dim=-1), [row for _, row in cases])
    assert [row.nonzero().squeeze(1).tolist() for row in weights] == expected


@pytest.mark.parametrize("candidates", [3, 4096], ids=["a few candidates first", "all at once"])
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 5, "top_p": 0.75}, 4),  # of five equals, three fifths are too little
        ({"min_p": 0.5, "top_p": 0.75}, 8),  # min-p keeps all ten
        ({"top_k": 7}, 7),
        ({"top_p": 0.15}, 2),
    ],
    ids=str,
)
def test_filters_settled_only_beyond_the_candidates(
    candidates: int, params: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_torch, "CANDIDATES", candidates)
    weights = token_weights(torch.zeros(1, 10), torch.zeros(1), [make_row(**params)])
    assert weights[0].nonzero().squeeze(1).tolist() == list(range(expected))


def test_top_p_stops_at_exactly_its_share(sampler: Sampler) -> None:
    rows = [make_row(position=p, top_p=0.5) for p in range(100)]
    assert {result.token for result in sample(sampler, [[1.0] * 4] * 100, *rows) if isinstance(result, Sampled)} == {
        0,
        1,
    }


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 0.49}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 3, "top_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),  # 4/9 + 3/9 of what top-k kept is enough
        ({"min_p": 0.7, "top_p": 0.5}, [0, 0, 0, 1]),  # min-p first: then 4/7 is more than half
        ({"logit_bias": ((0, math.log(4)),)}, [4 / 13, 2 / 13, 3 / 13, 4 / 13]),
    ],
)
@pytest.mark.thorough
def test_draws_follow_the_distribution(sampler: Sampler, params: dict[str, Any], expected: list[float]) -> None:
    draws = 20_000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(draws, 4)
    rows = [make_row(position=p, seed=99, **params) for p in range(draws)]
    counts = Counter(result.token for result in sampler(logits, rows) if isinstance(result, Sampled))
    possible = [token for token, chance in enumerate(expected) if chance]
    assert set(counts) == set(possible)
    chi_square = sum((counts[t] - draws * expected[t]) ** 2 / (draws * expected[t]) for t in possible)
    assert chi_square < {0: 1e-9, 1: 10.83, 2: 13.82, 3: 16.27}[len(possible) - 1]  # the 99.9 % points


def test_same_seed_and_position_draw_the_same_and_others_do_not(sampler: Sampler) -> None:
    logits = [[0.0] * 50]

    def text(seed: int) -> list[int]:
        return [token_of(sampler, logits[0], make_row(seed=seed, position=p)) for p in range(20)]

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(10)}) == 10


def test_equal_logits_go_to_the_lowest_id(sampler: Sampler) -> None:
    logits = [1.0, 3.0, 3.0, 3.0, 2.0]
    assert token_of(sampler, logits, make_row(temperature=0.0)) == 1
    assert token_of(sampler, logits, make_row(temperature=0.0, repetition_penalty=1.5, prompt=(1,))) == 2
    assert {token_of(sampler, logits, make_row(top_k=2, position=p)) for p in range(50)} == {1, 2}


def test_greedy_takes_the_highest_logit_after_bias(sampler: Sampler) -> None:
    assert token_of(sampler, [0.0, 5.0, 4.0], make_row(temperature=0.0, logit_bias=((2, 1.5),))) == 2
    assert token_of(sampler, [0.0, 5.0, 4.0], make_row(temperature=0.0, logit_bias=((1, -100.0), (0, 4.5)))) == 0


def test_ids_outside_the_vocabulary_touch_no_other_row(sampler: Sampler) -> None:
    odd = make_row(temperature=0.0, logit_bias=((3, 100.0), (-1, 100.0)), min_tokens=5, stop_token_ids=(4,), eos=(3,))
    results = sample(sampler, [[0.0, 1.0, 2.0], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]], odd, odd, odd)
    assert results == [Sampled(2), Sampled(0), Sampled(2)]


def test_stop_tokens_wait_for_min_tokens(sampler: Sampler) -> None:
    logits = [9.0, 8.0, 7.0, 1.0]

    def row(output: tuple[int, ...], **params: Any) -> SampleRow:
        return make_row(output=output, eos=(0,), min_tokens=2, **params)

    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}]
    for params in kinds:
        assert token_of(sampler, logits, row((3,), stop_token_ids=(1,), **params)) == 2
        assert token_of(sampler, logits, row((3,), ignore_eos=True, **params)) == 1
        assert token_of(sampler, logits, row((3, 3), stop_token_ids=(1,), **params)) == 0


def test_penalties_count_prompt_and_output_as_they_should(sampler: Sampler) -> None:
    logits = [2.0, 1.9, 1.0]
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert token_of(sampler, logits, make_row(**greedy, prompt=(0,), repetition_penalty=1.1)) == 1
    assert token_of(sampler, logits, make_row(**greedy, prompt=(0,), presence_penalty=1.0, frequency_penalty=1.0)) == 0
    assert token_of(sampler, logits, make_row(**greedy, output=(0,), presence_penalty=0.2)) == 1
    assert token_of(sampler, logits, make_row(**greedy, output=(0, 1, 1), frequency_penalty=0.2)) == 0
    assert token_of(sampler, logits, make_row(**greedy, output=(0, 0, 1), frequency_penalty=0.2)) == 1
    assert token_of(sampler, [-1.0, -1.05, -9.0], make_row(**greedy, prompt=(0,), repetition_penalty=1.1)) == 1


@pytest.mark.parametrize("temperature", [2e-5, 1e-4])
def test_a_tiny_temperature_does_not_overflow(sampler: Sampler, temperature: float) -> None:
    assert token_of(sampler, [1e30, -1e30, 0.0], make_row(temperature=temperature)) == 0
    assert token_of(sampler, [-80.0, 80.0, 79.0], make_row(temperature=temperature, top_p=0.9)) == 1


def test_a_row_that_cannot_be_drawn_fails_alone(sampler: Sampler) -> None:
    nan, inf = math.nan, math.inf
    bad = [[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf]]
    good = [0.0, 1.0, 2.0]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "logprobs": 1}]
    for params in kinds:
        row = make_row(**params)
        results = sample(sampler, [good, *bad, good], *[row] * 5)
        (alone,) = sample(sampler, [good], row)
        assert results[0] == results[4] == alone
        assert isinstance(alone, Sampled)
        assert alone.token == 2
        assert [type(result) for result in results[1:4]] == [SamplingFailed] * 3
    failed = results[1]
    assert isinstance(failed, SamplingFailed)
    assert "not numbers" in str(failed.error())


@pytest.mark.parametrize("params", [{}, {"top_k": 1}, {"temperature": 0.0}], ids=str)
def test_a_mask_does_not_hide_what_is_no_number(sampler: Sampler, params: dict[str, Any]) -> None:
    (result,) = sample(sampler, [[0.0, math.nan, 1.0]], make_row(eos=(1,), min_tokens=1, **params))
    assert isinstance(result, SamplingFailed) and "not numbers" in str(result.error())


@pytest.mark.parametrize("params", [{}, {"min_p": 0.1, "top_p": 0.9}, {"top_k": 1}, {"temperature": 0.0}], ids=str)
def test_masking_every_token_is_a_failure(sampler: Sampler, params: dict[str, Any]) -> None:
    row = make_row(eos=(0, 1), min_tokens=1, **params)
    (result,) = sample(sampler, [[1.0, 2.0]], row)
    assert isinstance(result, SamplingFailed)
    assert "masked" in result.reason


def test_a_masked_logit_is_never_drawn(sampler: Sampler) -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0]
    drawn = {
        token_of(sampler, logits, make_row(position=p, top_p=top_p)) for p in range(100) for top_p in (1.0, 0.999999)
    }
    assert drawn == {1, 3}


def test_the_logits_are_not_changed_and_an_empty_batch_is_fine(sampler: Sampler) -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    penalised = make_row(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((1, 5.0),), logprobs=2)
    sampler(logits, [penalised, make_row(temperature=0.0, min_tokens=4, eos=(2,))])
    assert torch.equal(logits, before)
    assert sampler(torch.zeros(0, VOCAB), []) == []


def test_logprobs_are_of_the_raw_logits_best_first(sampler: Sampler) -> None:
    raw = torch.tensor([[1.0, 3.0, 3.0, 2.0, -1.0]])
    logprobs = raw.double().log_softmax(-1)[0].tolist()
    row = make_row(temperature=0.0, logit_bias=((4, 50.0),), logprobs=3)
    (result,) = sampler(raw, [row])
    assert isinstance(result, Sampled)
    assert result.token == 4
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(logprobs[4], abs=1e-6)
    assert [token for token, _ in result.logprob.top] == [1, 2, 3]
    assert [value for _, value in result.logprob.top] == pytest.approx([logprobs[t] for t in (1, 2, 3)], abs=1e-6)


def test_zero_logprobs_gives_the_chosen_tokens_alone(sampler: Sampler) -> None:
    (result,) = sample(sampler, [[0.0, 0.0]], make_row(temperature=0.0, logprobs=0))
    assert isinstance(result, Sampled)
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(math.log(0.5))
    assert result.logprob.top == ()


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=30, max_size=30), min_size=1, max_size=4),
    st.sampled_from([0, 1, 4, 29, 30, 31]),
)
def test_best_alternatives_are_ranked_even_among_ties(
    backend: SamplingBackend, values: list[list[int]], k: int
) -> None:
    chosen = [index % 30 for index in range(len(values))]
    found = backend.logprobs(torch.tensor(values, dtype=torch.float32), chosen, k)
    for row, token, entry in zip(values, chosen, found, strict=True):
        ranked = sorted(range(30), key=lambda t: (-row[t], t))
        total = math.log(sum(math.exp(value) for value in row))
        assert [t for t, _ in entry.top] == ranked[:k]
        assert [value for _, value in entry.top] == pytest.approx([row[t] - total for t in ranked[:k]], abs=1e-5)
        assert entry.logprob == pytest.approx(row[token] - total, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logprobs_of_bad_logits_are_an_error(backend: SamplingBackend, bad: float) -> None:
    with pytest.raises(InternalError, match="not numbers"):
        backend.logprobs(torch.tensor([[0.0, bad]]), [0], 1)
