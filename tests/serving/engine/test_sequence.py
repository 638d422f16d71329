"""A sequence: what it counts as output, why it ends, and what its messages say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.sequence import OutputView
from serving.messages import FinishReason, TokenLogprob
from tests.fakes.sequences import make_sequence

TOKENS = st.lists(st.integers(0, 9), max_size=12)


@given(TOKENS, TOKENS, st.integers(-12, 11), st.integers(-13, 13), st.integers(-13, 13))
def test_the_output_is_seen_as_a_list_without_the_prompt(
    prompt: list[int], output: list[int], index: int, start: int, stop: int
) -> None:
    view = OutputView([*prompt, *output], len(prompt))
    assert list(view) == output and len(view) == len(output)
    assert view[start:stop] == output[start:stop]
    if -len(output) <= index < len(output):
        assert view[index] == output[index]


def test_reading_the_output_takes_no_step_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are sampled are compared with it: at 20,000 tokens that took most of a step."""
    view = OutputView([1, 2, 3], 1)
    monkeypatch.delattr(OutputView, "__getitem__")
    assert [*view] == [2, 3]


def test_an_index_before_the_output_is_an_error() -> None:
    with pytest.raises(IndexError):
        OutputView([1, 2, 3], 2)[-2]


def test_an_index_after_the_output_is_an_error() -> None:
    with pytest.raises(IndexError):
        OutputView([1, 2, 3], 2)[1]


@pytest.mark.parametrize(
    ("output", "fields", "finish"),
    [
        ([1], {}, None),
        ([1, 2], {"max_tokens": 3}, None),
        ([1, 2, 3], {"max_tokens": 3}, FinishReason.LENGTH),
        ([9], {}, FinishReason.STOP),  # the model's own end
        ([9], {"ignore_eos": True}, None),
        ([7], {"stop_token_ids": (7,)}, FinishReason.STOP),
        ([9], {"ignore_eos": True, "stop_token_ids": (9,)}, FinishReason.STOP),
        ([1, 9], {"max_tokens": 2}, FinishReason.STOP),  # both at once: the stop is what it was
        ([1] * 6, {"max_tokens": 99}, FinishReason.LENGTH),  # the context is full
        ([1] * 5, {"max_tokens": 99}, None),
    ],
)
def test_why_a_sequence_ends(output: list[int], fields: dict[str, Any], finish: FinishReason | None) -> None:
    seq = make_sequence(None, [0, 0], **fields)
    seq.tokens += output
    assert seq.finish_for(output[-1], frozenset({9}), 8) is finish


def test_tokens_of_an_earlier_try_count_towards_the_length() -> None:
    seq = make_sequence(None, [0], generated=[1, 2], max_tokens=3)
    seq.tokens.append(3)
    assert seq.finish_for(3, frozenset(), 99) is FinishReason.LENGTH
    assert list(seq.output) == [1, 2, 3]


def test_a_delta_says_where_its_tokens_belong() -> None:
    seq = make_sequence(None, [0] * 4, generated=[1, 2])
    seq.cached = 5
    seq.prompt_logprobs = [None, TokenLogprob(-1.0)]
    seq.tokens.append(3)
    later = seq.delta((3,), (), None)
    assert (later.index, later.tokens, later.finish) == (2, (3,), None)
    assert later.cached_tokens == 4, "of the prompt; output is nothing a client sent"
    assert later.prompt_logprobs == (), "they went with the first token"


def test_prompt_logprobs_go_with_the_first_token_alone() -> None:
    seq = make_sequence(None, [0] * 2)
    seq.prompt_logprobs = [None, TokenLogprob(-1.0)]
    seq.tokens.append(3)
    assert seq.delta((3,), (), None).prompt_logprobs == (None, TokenLogprob(-1.0))
    seq.tokens.append(4)
    assert seq.delta((4,), (), None).prompt_logprobs == ()
