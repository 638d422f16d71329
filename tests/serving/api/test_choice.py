"""What a client sees of the tokens does not depend on how they arrive: text, logprobs, counts and the ending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.api.choice import Choice, ChoiceDelta
from serving.errors import InternalError
from serving.messages import Delta, FinishReason, SamplingParams
from serving.text.tokenizer import Tokenizer
from tests.fakes.generate import VOCAB_SIZE
from tests.serving.api.plans import PLAIN, deltas, plan_of

STOP_TOKEN = 5


def choice_of(
    tokenizer: Tokenizer, *, stops: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False
) -> Choice:
    sampling = SamplingParams(max_tokens=100, logprobs=0, stop_token_ids=(STOP_TOKEN,))
    request = replace(PLAIN, sampling=sampling)
    plan = plan_of(request, stops=tuple(stops), include_stop=include_stop, min_tokens=min_tokens)
    return Choice(plan, plan.sequences[0], tokenizer)


def play(choice: Choice, parts: list[Delta]) -> list[ChoiceDelta]:
    outputs = []
    for part in parts:
        outputs.append(choice.push(part))
        if choice.finish is not None:
            break
    return outputs


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=25),
    cuts=st.lists(st.integers(1, 24)),
    stops=st.lists(st.sampled_from(["a", "e", "th", "\ufffd", "es", "in the"]), max_size=2),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_batching_of_tokens_changes_nothing(
    tokenizer: Tokenizer, tokens: list[int], cuts: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    def run(cuts: Sequence[int]) -> tuple[str, list[int], int, FinishReason | None, str | int | None]:
        choice = choice_of(tokenizer, stops=stops, min_tokens=min_tokens, include_stop=include)
        outputs = play(choice, deltas(tokens, cuts, FinishReason.LENGTH))
        shown = "".join(output.text for output in outputs)
        entries = [entry.token for output in outputs for entry in output.entries]
        return shown, entries, choice.completion_tokens, choice.finish, outputs[-1].stop_reason

    one_by_one = run(range(1, 30))
    assert run(cuts) == one_by_one
    if not stops:
        assert one_by_one == (tokenizer.decode(tokens, continues=True), tokens, len(tokens), "length", None)


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet="abthe é😀", max_size=20), stop=st.sampled_from(["th", "e ", "b"]))
def test_shown_logprobs_are_those_of_the_shown_text(tokenizer: Tokenizer, text: str, stop: str) -> None:
    tokens = tokenizer.encode(text + stop + "rest", add_special_tokens=False)
    choice = choice_of(tokenizer, stops=[stop])
    shown, entries = "", 0
    for output in play(choice, deltas(tokens, range(30), FinishReason.LENGTH)):
        shown += output.text
        entries += len(output.entries)
        spelled = b"".join(tokenizer.bytes_of[token] for token in tokens[:entries]).decode(errors="ignore")
        assert spelled.startswith(shown)  # a token comes no later than its first character
        assert all(entry.start < len(shown) for entry in output.entries)  # and no sooner
    assert choice.finish is FinishReason.STOP
    assert shown == (text + stop)[: (text + stop).index(stop)]


def test_a_stop_token_is_named_only_if_the_client_asked_for_it(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("the")
    for token, reason in ((STOP_TOKEN, STOP_TOKEN), (2, None)):
        choice = choice_of(tokenizer)
        outputs = play(choice, deltas([*word, token], [], FinishReason.STOP))
        assert outputs[-1].text == "the"
        assert outputs[-1].stop_reason == reason
        assert choice.completion_tokens == len(word) + 1


def test_included_stop_token_is_shown(tokenizer: Tokenizer) -> None:
    outputs = play(choice_of(tokenizer, include_stop=True), deltas([STOP_TOKEN], [], FinishReason.STOP))
    assert outputs[-1].text == tokenizer.token_text(STOP_TOKEN)
    assert len(outputs[-1].entries) == 1


def test_no_stop_string_before_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = [token for word in ("a", "b", "a", "b") for token in tokenizer.encode(word)]
    choice = choice_of(tokenizer, stops=["b"], min_tokens=2)
    shown = "".join(output.text for output in play(choice, deltas(tokens, range(9), FinishReason.LENGTH)))
    assert (shown, choice.completion_tokens) == ("aba", 4)


def test_tokens_out_of_order_are_a_bug_and_not_an_answer(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    first, second = deltas([1, 2, 3], [1], FinishReason.LENGTH)
    choice.push(first)
    with pytest.raises(InternalError, match="token 1 was due and token 0 came"):
        choice.push(first)
    assert choice.push(second).finish is FinishReason.LENGTH
