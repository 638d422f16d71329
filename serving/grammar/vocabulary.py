"""A model's vocabulary as llguidance reads it: plain data that another process can be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from serving.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """`tokens` are the bytes of each; `ends` the tokens that end a text, one at least."""

    tokens: list[bytes]
    special: list[int]
    bos: int | None
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_token_ids: Sequence[int] = ()) -> Vocabulary:
        """Without `eos_token_ids` that the tokenizer knows, its own end of text."""
        known = [token for token in eos_token_ids if token < tokenizer.vocab_size]
        return cls(
            tokens=[tokenizer.bytes_of[token] for token in range(tokenizer.vocab_size)],
            special=sorted(tokenizer.special_ids),
            bos=tokenizer.bos_id,
            ends=known or [tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.vocab_size - 1],
        )

    def read(self, encode: Encode) -> LLTokenizer:
        """`encode` gives a text's tokens, for those that a grammar forces."""
        return LLTokenizer(TokenizerWrapper(_Spelled(self, encode)), eos_token=self.ends)

    def greedy(self) -> Encode:
        """Encodes by the longest token each time, for where the tokenizer itself is not at hand."""
        special = set(self.special)
        ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        longest = max(map(len, ids), default=0)

        def encode(text: str) -> list[int]:
            data, at, found = text.encode(), 0, list[int]()
            while at < len(data):
                sizes = range(min(longest, len(data) - at), 0, -1)
                size = next((size for size in sizes if data[at : at + size] in ids), 0)
                found += [ids[data[at : at + size]]] if size else []
                at += max(1, size)
            return found

        return encode


class _Spelled:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode):
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = vocabulary.bos
        self.special_token_ids = vocabulary.special
        self.tokens = vocabulary.tokens
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
