"""The incremental forms equal the whole ones, for every sequence of tokens and every cut of a text."""

from __future__ import annotations

import itertools
import time

from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.text.detokenizer import Detokenizer, StopMatcher
from serving.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 399), max_size=30)
LETTERS = st.text(alphabet="ab", max_size=24)


@settings(deadline=None, max_examples=400)
@given(ids=IDS, skip=st.booleans(), continues=st.booleans())
def test_pieces_are_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool, continues: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip, continues=continues)


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, continues=False)
    shown = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def test_an_emoji_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode("😀", add_special_tokens=False)
    *first, last = [detokenizer.push(token) for token in tokens if tokenizer.token_text(token) != " "]
    assert len(first) == 3
    assert set(first) == {""}
    assert last == "😀"
    assert detokenizer.finish() == ""


def test_a_character_cut_by_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode("x😀", add_special_tokens=False)[:-1]
    shown = "".join(detokenizer.push(token) for token in tokens)
    assert shown.strip() == "x"
    assert detokenizer.finish() == "�"


def test_the_space_before_the_first_word_depends_on_what_comes_before(tokenizer: Tokenizer) -> None:
    space = next(token for token in range(384) if tokenizer.bytes_of[token] == b" ")
    kept = Detokenizer(tokenizer, continues=True)
    assert kept.push(space) + kept.push(space) == "  "
    stripped = Detokenizer(tokenizer, continues=False)
    spaces = stripped.push(space) + stripped.push(space) + stripped.finish()
    assert spaces == "  "[tokenizer.bytes_of.leading_spaces :]


# ---- stop strings ----------------------------------------------------------------------------------------------


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: of the stops complete after the fewest characters the longest, and where it starts."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


def run(matcher: StopMatcher, parts: list[str]) -> tuple[str, str | None]:
    shown = ""
    for part in parts:
        piece = matcher.push(part)
        shown += piece.text
        if piece.stop is not None:
            return shown, piece.stop
    return shown + matcher.finish(), None


def cut_at(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=500)
@given(
    text=LETTERS,
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24)),
    include=st.booleans(),
)
@example(text="aab", stops=["ab"], cuts=[1, 2], include=False)
@example(text="abcd", stops=["abcd", "bc"], cuts=[], include=False)
@example(text="ababac", stops=["abac"], cuts=[4], include=False)
def test_the_first_stop_cuts_however_the_text_arrives(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    shown, stop = run(StopMatcher(stops, include=include), cut_at(text, cuts))
    expected = first_stop(text, stops)
    if expected is None:
        assert (shown, stop) == (text, None)
    else:
        start, found = expected
        assert (shown, stop) == (text[: start + (len(found) if include else 0)], found)


@given(text=LETTERS, stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_held_back_than_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for end, character in enumerate(text, start=1):
        piece = matcher.push(character)
        shown += piece.text
        if piece.stop is not None:
            return
        held = text[len(shown) : end]
        assert shown + held == text[:end]
        longest = max((k for stop in stops for k in range(len(stop)) if text[:end].endswith(stop[:k])), default=0)
        assert len(held) == longest


def test_skipped_text_neither_begins_nor_completes_a_stop() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xa").text == "x"
    assert matcher.skip("b a").text == "ab a"
    assert matcher.push("b").stop is None
    assert matcher.push("ab").stop == "ab"


def test_stop_strings_are_made_ready_once_for_all_choices() -> None:
    """A response has up to 256 choices, each with a matcher of its own."""
    stops = [f"{number:04d}" + "ab" * 510 for number in range(32)]
    StopMatcher(stops)

    def seconds() -> float:
        began = time.process_time()
        for _ in range(256):
            StopMatcher(stops)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.5
