"""What may come next under a grammar: whole outputs follow it, and where one stands is a function of its tokens."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.grammar.forms import choice_grammar, json_grammar, regex_grammar, written_grammar
from serving.grammar.grammars import (
    KEPT,
    Allowed,
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    Grammars,
    GrammarState,
)
from serving.text.tokenizer import Tokenizer
from tests.serving.grammar.following import ENDS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def ids(allowed: Allowed, tokenizer: Tokenizer) -> list[int]:
    return [int(token) for token in allowed.mask(tokenizer.vocab_size).nonzero()[0]]


def walk(state: GrammarState, tokenizer: Tokenizer, seed: int, most: int = 300) -> list[int]:
    """An output drawn at random, token by token, up to its end."""
    draw, output = random.Random(seed), list[int]()
    while len(output) < most:
        (allowed,) = state.allowed(output)
        assert allowed is not None
        found = ids(allowed, tokenizer)
        ends = [token for token in found if token in ENDS]
        assert allowed.ended == (set(found) <= set(ENDS))
        token = ends[0] if ends else draw.choice(found)
        output.append(token)
        if token in ENDS:
            return output
    raise AssertionError("no end")


def begun_and_draft(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, at: float, size: int
) -> tuple[list[int], list[int]]:
    """An output of SCHEMA up to somewhere, and the tokens that come next, but for its end."""
    output = walk(grammars.begin(json_grammar(SCHEMA)), tokenizer, seed)
    begun = int(at * (len(output) - 1))
    return output[:begun], output[begun : min(begun + size, len(output) - 1)]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_every_output_follows_the_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    output = walk(grammars.begin(json_grammar(SCHEMA)), tokenizer, seed)
    value = json.loads(tokenizer.decode(output))
    assert list(value) == ["name", "age", "tags"] and len(value["name"]) <= 12
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3 and all(tag in ("red", "green", 7, None) for tag in value["tags"])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_where_it_stands_is_a_function_of_the_tokens(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, cut: float
) -> None:
    """Another worker goes on after any token, from the tokens alone."""
    output = walk(grammars.begin(json_grammar(SCHEMA)), tokenizer, seed)
    begun = int(cut * (len(output) - 1))  # an output that has ended is not gone on with
    followed, anew = grammars.begin(json_grammar(SCHEMA)), grammars.begin(json_grammar(SCHEMA))
    for length in range(begun):
        followed.follow(output[:length])
    (one,), (other,) = followed.allowed(output[:begun]), anew.allowed(output[:begun])
    assert one is not None and other is not None
    assert (one.bits == other.bits).all() and one.ended == other.ended


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1), wrong=st.integers(0, 8), size=st.integers(0, 8))
def test_a_draft_is_looked_at_token_by_token(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, at: float, wrong: int, size: int
) -> None:
    """After each drafted token stands what would stand there without drafts; after one that may not come, nothing."""
    output, draft = begun_and_draft(grammars, tokenizer, seed, at, size)
    if wrong < len(draft):
        draft[wrong] = 1  # a special token, which no text has
    state = grammars.begin(json_grammar(SCHEMA))
    found = state.allowed(output, draft)
    assert len(found) == len(draft) + 1
    for place, allowed in enumerate(found):
        if place > wrong and wrong < len(draft):
            assert allowed is None
            continue
        (expected,) = grammars.begin(json_grammar(SCHEMA)).allowed([*output, *draft[:place]])
        assert allowed is not None and expected is not None and (allowed.bits == expected.bits).all()
    (after,) = state.allowed(output)  # nothing of the draft has stayed
    (expected,) = grammars.begin(json_grammar(SCHEMA)).allowed(output)
    assert after is not None and expected is not None and (after.bits == expected.bits).all()


def test_special_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Inside a string their letters may come, they themselves may not."""
    state = grammars.begin(json_grammar({"type": "string"}))
    (allowed,) = state.allowed(tokenizer.encode('"a', add_special_tokens=False))
    assert allowed is not None
    assert not set(ids(allowed, tokenizer)) & tokenizer.special_ids
    assert set(tokenizer.encode("<|im_end|>x"[1:], add_special_tokens=False)) <= set(ids(allowed, tokenizer))


def test_every_token_that_ends_a_text_ends_the_output(grammars: Grammars) -> None:
    (allowed,) = grammars.begin(regex_grammar("")).allowed([])
    assert allowed is not None and allowed.ended
    assert [token for token in range(384) if allowed.mask(384)[token]] == [0, 2]


def test_a_larger_vocabulary_has_no_further_tokens(grammars: Grammars) -> None:
    """Models' logits are padded beyond the tokenizer's words."""
    (allowed,) = grammars.begin(regex_grammar(r"(?s:.*)")).allowed([])
    assert allowed is not None
    mask = allowed.mask(1000)
    assert mask[:384].any() and not mask[384:].any()


def test_an_output_that_does_not_follow_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="does not follow"):
        grammars.begin(regex_grammar("[0-9]+")).follow(tokenizer.encode("ab", add_special_tokens=False))


def test_a_grammar_that_does_not_compile_is_told_by_its_state(grammars: Grammars) -> None:
    state = grammars.begin("no grammar")
    with pytest.raises(GrammarError):
        state.allowed([])


def test_compiled_grammars_are_kept_in_bounds(tokenizer: Tokenizer) -> None:
    grammars = Grammars(GrammarCompiler(lambda: tokenizer, ENDS))
    first = grammars.begin(regex_grammar("a"))
    assert grammars.begin(regex_grammar("a"))._compiled is first._compiled
    assert grammars.begin(regex_grammar("a"), "an owner")._compiled is not first._compiled, "it could tell by time"
    for number in range(2 * KEPT):
        grammars.begin(regex_grammar(f"a{number}"))
    assert len(grammars._compiled) == KEPT
    first.allowed([])  # one that is not kept any more goes on


@pytest.mark.parametrize("text", ["a", "aab", "b", "ab", "abb"])
def test_a_regex_is_of_the_whole_output(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    state = grammars.begin(regex_grammar("a+b"))
    try:
        (allowed,) = state.allowed(tokenizer.encode(text, add_special_tokens=False))
    except GrammarError:
        assert not re.fullmatch("a+b", text) and not re.fullmatch("a+", text)
        return
    assert allowed is not None
    assert bool(set(ENDS) & set(ids(allowed, tokenizer))) == bool(re.fullmatch("a+b", text))


def test_whatever_breaks_a_compile_breaks_its_own_output_alone() -> None:
    """A panic of the library is no ordinary exception."""

    class Panic(BaseException):
        pass

    compiled: Future[CompiledGrammar] = Future()
    compiled.set_exception(Panic("out of bounds"))
    with pytest.raises(GrammarError, match="out of bounds"):
        GrammarState(compiled).allowed([])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1), wrong=st.integers(0, 8), size=st.integers(0, 8))
def test_a_draft_is_possible_as_far_as_its_masks_allow(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, at: float, wrong: int, size: int
) -> None:
    output, draft = begun_and_draft(grammars, tokenizer, seed, at, size)
    if wrong < len(draft):
        draft[wrong] = random.Random(seed).randrange(tokenizer.vocab_size)
    state = grammars.begin(json_grammar(SCHEMA))
    assert state.possible(output, draft) == len(draft)  # nothing has been drawn here yet
    masks = state.allowed(output, draft)
    expected = sum(mask is not None for mask in masks) - 1
    assert state.possible(output, draft) == expected
    assert state.allowed(output)[0] is not None  # nothing of the draft has stayed


def test_a_draft_after_what_does_not_follow_is_not_possible(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = grammars.begin(regex_grammar("a"))
    state.allowed([])
    wrong = tokenizer.encode("b", add_special_tokens=False)
    assert state.possible(wrong, wrong) == 0
    with pytest.raises(GrammarError):
        state.allowed(wrong)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1))
def test_a_token_is_possible_if_the_mask_has_it(grammars: Grammars, tokenizer: Tokenizer, seed: int, at: float) -> None:
    """Also where only one text can follow, however it is written. Ends are told by the mask alone."""
    output, _ = begun_and_draft(grammars, tokenizer, seed, at, 0)
    state = grammars.begin(json_grammar(SCHEMA))
    (allowed,) = state.allowed(output)
    assert allowed is not None
    possible = {token for token in range(tokenizer.vocab_size) if state.possible(output, [token])}
    assert possible - set(ENDS) == set(ids(allowed, tokenizer)) - set(ENDS)
    assert not possible & set(ENDS) - set(ids(allowed, tokenizer))


def test_a_forced_text_may_be_written_in_any_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    (allowed,) = grammars.begin(choice_grammar(["the mill"])).allowed([])
    assert allowed is not None
    written = {bytes(tokenizer.bytes_of[token]) for token in ids(allowed, tokenizer)}
    assert len(written) > 1 and all(b"the mill".startswith(token) for token in written)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1), size=st.integers(0, 6), own=st.floats(0, 1))
def test_what_is_drawn_is_the_best_that_may_come(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, at: float, size: int, own: float
) -> None:
    """After the output and each drafted token, up to the first that differs; masks only where they are needed."""
    output, draft = begun_and_draft(grammars, tokenizer, seed, at, size)
    random = np.random.default_rng(seed)
    scores = random.standard_normal((len(draft) + 1, tokenizer.vocab_size + 7))  # a model may have further tokens
    for place, token in enumerate(draft):
        scores[place, token] += 9.0 * (random.random() < own)
    best, state, asked = [int(row.argmax()) for row in scores], grammars.begin(json_grammar(SCHEMA)), list[int]()

    def choose(place: int, allowed: Allowed) -> int:
        asked.append(place)
        return int(np.where(allowed.mask(scores.shape[1]), scores[place], -np.inf).argmax())

    found = state.drawn(output, draft, best, choose)
    assert len(found) == len(draft) + 1
    for place, token in enumerate(found):
        (allowed,) = grammars.begin(json_grammar(SCHEMA)).allowed([*output, *draft[:place]])
        assert allowed is not None
        mask = allowed.mask(scores.shape[1])
        assert token == int(np.where(mask, scores[place], -np.inf).argmax())
        assert (place in asked) == (not mask[best[place]] or best[place] in ENDS)
        if place < len(draft) and token != draft[place]:
            break
    assert asked == sorted(set(asked))
    (after,), (expected,) = state.allowed(output), grammars.begin(json_grammar(SCHEMA)).allowed(output)
    assert after is not None and expected is not None and (after.bits == expected.bits).all()


@pytest.mark.parametrize("token", [384, 2**31, 2**40, -1])
def test_a_token_beyond_the_vocabulary_may_not_come(grammars: Grammars, tokenizer: Tokenizer, token: int) -> None:
    """Models have more tokens than their tokenizers, and prompts may have those, from which drafts are made."""
    assert token not in range(tokenizer.vocab_size)
    state = grammars.begin(regex_grammar("a*"))
    (allowed,) = state.allowed([])
    assert allowed is not None
    a = tokenizer.encode("a", add_special_tokens=False)
    assert state.possible([], [*a, token, *a]) == 1
    assert state.drawn([], [], [token], lambda place, allowed: a[0]) == a
    assert state.allowed([])[0] is not None  # it is of use still


def spelled(grammars: Grammars, tokenizer: Tokenizer, grammar: str) -> set[bytes]:
    (allowed,) = grammars.begin(grammar).allowed([])
    assert allowed is not None
    return {bytes(tokenizer.bytes_of[token]) for token in ids(allowed, tokenizer)}


@pytest.mark.parametrize("forced", ["", '%llguidance {"no_forcing": false}'])
def test_a_grammar_written_out_keeps_its_own_options(grammars: Grammars, tokenizer: Tokenizer, forced: str) -> None:
    """But for the one that would force tokens."""
    rules = f'start: "the" "mill"\n%ignore /[ ]+/\n{forced}'
    assert b" " not in spelled(grammars, tokenizer, written_grammar(rules))
    skips = written_grammar(f'%llguidance {{"allow_initial_skip": true}}\n{rules}')
    assert {b" ", b"t"} <= spelled(grammars, tokenizer, skips)


def test_no_name_in_a_grammar_is_ours(grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert spelled(grammars, tokenizer, written_grammar('start: whole\nwhole: "q" whole | "q"')) == {b"q"}
    with pytest.raises(GrammarError, match="whole"):
        grammars.begin(written_grammar('start: "q" @whole | "q"')).allowed([])


def test_a_mistake_is_told_with_the_clients_lines_alone(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="unknown name") as raised:
        grammars.begin(written_grammar('start: "q"\n  | lost')).allowed([])
    assert "| lost" in str(raised.value) and "llguidance" not in str(raised.value)
