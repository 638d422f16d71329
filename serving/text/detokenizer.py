"""Output tokens to text, one at a time: whole characters only, and nothing past a stop string.

The state of both classes is a function of the tokens fed so far, so a new instance fed with them continues a request
that has moved. They know nothing of requests or logprobs.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from serving.text.tokenizer import Tokenizer, strip_leading


class Detokenizer:
    """Turns token ids into text that never ends in half a character.

    What `push` and `finish` return adds up to `Tokenizer.decode` of the same tokens with the same options, for every
    sequence of tokens: bytes that turn out to be no UTF-8 come out as U+FFFD as soon as that is certain. Constant
    time for each token.
    """

    __slots__ = ("_bytes_of", "_pending", "_skip", "_strip")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`continues` says that other tokens come before these, as a prompt does before output.

        `shown` are special tokens that are not skipped.
        """
        self._bytes_of = tokenizer.bytes_of
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown:
            self._skip = self._skip - shown
        self._pending = b""  # the start of a character, at most 3 bytes
        self._strip = 0 if continues else tokenizer.bytes_of.leading_spaces

    def push(self, token: int) -> str:
        """The text that `token` makes certain; empty when it ends inside a character or is left out."""
        if token in self._skip:
            return ""
        data = self._bytes_of[token]
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._without_lead(text) if self._strip else text

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD when the tokens end inside a character."""
        text = self._pending.decode("utf-8", errors="replace")
        self._pending = b""
        return text

    def _without_lead(self, text: str) -> str:
        kept = strip_leading(text, self._strip)
        # Spaces go only from the very front: once anything else has come, none is taken any more.
        self._strip = 0 if kept else self._strip - len(text)
        return kept


@dataclass(frozen=True, slots=True)
class MatchedText:
    """Text that may be shown, and the stop string that ended it when there was one."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in a growing text, and holds back what may be the beginning of one.

    The first is the one that is complete after the fewest characters, so the answer depends on the text alone and not
    on how it was cut into tokens; of several that are complete at the same character, the longest. The text is cut
    where that one starts, or where it ends if `include` is set. Knuth, Morris and Pratt's automaton for each stop
    string: constant time for each character, amortised.
    """

    __slots__ = ("_borders", "_held", "_include", "_lengths", "_starts", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "a stop string is not empty"
        self._stops = tuple(stops)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # of each stop string, how much the text ends with
        self._starts = tuple({stop[0] for stop in self._stops})
        self._held = ""

    def push(self, text: str) -> MatchedText:
        """`text` is the next part of the whole; what comes back is the next part that may be shown."""
        if not self._held and not any(start in text for start in self._starts):
            return MatchedText(text)
        whole = self._held + text
        seen = len(self._held)
        for position, character in enumerate(text, start=seen + 1):
            complete = self._step(character)
            if complete is not None:
                cut = position if self._include else position - len(complete)
                self._reset()
                return MatchedText(whole[:cut], complete)
        shown = len(whole) - max(self._lengths)
        self._held = whole[shown:]
        return MatchedText(whole[:shown])

    def skip(self, text: str) -> MatchedText:
        """Like `push`, for text in which no stop string counts: no match begins, continues or ends in it."""
        matched = MatchedText(self._held + text)
        self._reset()
        return matched

    def finish(self) -> str:
        """What was held back, when no text follows."""
        held = self._held
        self._reset()
        return held

    def _reset(self) -> None:
        self._held = ""
        self._lengths = [0] * len(self._stops)

    def _step(self, character: str) -> str | None:
        """Advance every automaton by one character; the longest stop string that it completes."""
        complete: str | None = None
        for number, stop in enumerate(self._stops):
            length, borders = self._lengths[number], self._borders[number]
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            if length == len(stop) and (complete is None or length > len(complete)):
                complete = stop
            self._lengths[number] = length
        return complete


@lru_cache(maxsize=256)  # every choice of a response has the same
def _borders(text: str) -> Sequence[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = borders[length - 1]
        length += text[position] == text[length]
        borders[position] = length
    return borders
