"""Whether a text may be an output under a grammar, by the small vocabulary of these tests."""

from __future__ import annotations

from serving.grammar.grammars import GrammarError, Grammars
from serving.text.tokenizer import Tokenizer

ENDS = (0, 2)  # tokens that end a text
SPECIAL = 1  # a token that stands for a form's mark


def accepts(grammars: Grammars, tokenizer: Tokenizer, grammar: str, text: str, mark: str = "") -> bool:
    """True if the text may be an output; `mark` in it is the special token."""
    tokens: list[int] = []
    for i, part in enumerate(text.split(mark) if mark else [text]):
        tokens += [SPECIAL] * (i > 0) + tokenizer.encode(part, add_special_tokens=False)
    try:
        (allowed,) = grammars.begin(grammar).allowed(tokens)
    except GrammarError:
        return False
    assert allowed is not None
    return any(allowed.mask(tokenizer.vocab_size)[end] for end in ENDS)
