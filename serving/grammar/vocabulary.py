"""A model's vocabulary as llguidance reads it: plain data that another process can be given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from serving.text.tokenizer import Tokenizer


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

    def read(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(_Spelled(self)), eos_token=self.ends)


class _Spelled:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.ends[0]
        self.bos_token_id = vocabulary.bos
        self.special_token_ids = vocabulary.special
        self.tokens = vocabulary.tokens

    def __call__(self, text: bytes) -> list[int]:
        """No token is forced (serving.grammar.grammars), so no text is ever encoded."""
        return []
