"""What a modelled model says: tokens that follow from the text, so that each continuation can be checked.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from serving.messages import Request

VOCABULARY = 32_000
EOS = 0

_MASK = (1 << 64) - 1


class ScriptedTexts:
    """What the model says: each token follows from the request's seed, its position and the two tokens before it.

    A request ends with EOS as its output token number `lengths[request_id]`, counted from 1; without one it goes on to
    its `max_tokens`.
    """

    def __init__(self, lengths: Mapping[str, int] | None = None):
        self.lengths: Mapping[str, int] = lengths if lengths is not None else {}

    def next(self, request: Request, tokens: Sequence[int]) -> int:
        """The token after `tokens`, prompt and output."""
        position = len(tokens)
        if self.lengths.get(request.request_id) == position + 1 - len(request.prompt):
            return EOS
        before = tokens[-2] if position > 1 else 0
        mixed = (tokens[-1] + 0x9E3779B9 * before + 0x85EBCA77 * position + request.sampling.seed) & _MASK
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
        return 1 + (mixed >> 32) % (VOCABULARY - 1)

    def written_out(self, request: Request) -> list[int]:
        """The whole output of an undisturbed run."""
        tokens = list(request.prompt)
        for number in count(1):
            tokens.append(self.next(request, tokens))
            if tokens[-1] == EOS or number == request.sampling.max_tokens:
                break
        return tokens[len(request.prompt) :]
