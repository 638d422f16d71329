"""Changes to a sequence's logits that follow from its parameters and its tokens so far: bias, masks, penalties.

All of it is a pure function of (parameters, tokens): `PenaltyState` only remembers the counting, and can be rebuilt
at any moment, on any worker. Nothing here samples or ranks tokens.

Shapes: E rows to edit, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.batch.device_copy import on_device
from serving.messages import SamplingParams


class PenaltyState:
    """How often each token occurs in a sequence: kept beside it so that a step counts only the new tokens.

    `counts` is float32 [V] (exact up to 2^24), occurrences in the output; `seen` is bool [V], occurrence in prompt
    or output.
    """

    def __init__(self, prompt_tokens: Sequence[int], vocab_size: int, device: torch.device | str = "cpu"):
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.length = 0  # output tokens counted
        # A single element is written through numpy's view of the same memory, in a tenth of torch's time.
        host = self.counts.device.type == "cpu"
        self._counts: Tensor | NDArray[np.float32] = self.counts.numpy() if host else self.counts
        self._seen: Tensor | NDArray[np.bool_] = self.seen.numpy() if host else self.seen
        self.seen.index_fill_(0, on_device(prompt_tokens, torch.int64, device), True)

    def follow(self, output_tokens: Sequence[int]) -> None:
        """Count the tokens of `output_tokens` that are not counted yet; the others must be those counted before.

        The result is the same to the bit whether they come one by one or at once.
        """
        assert len(output_tokens) >= self.length, "the sequence lost tokens that were already counted"
        new = len(output_tokens) - self.length
        if new == 1:
            token = output_tokens[-1]
            self._counts[token] += 1
            self._seen[token] = True
        elif new:
            ids = on_device(output_tokens[self.length :], torch.int64, self.counts.device)
            self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
            self.seen.index_fill_(0, ids, True)
        self.length = len(output_tokens)


def add_bias(logits: Tensor, biases: Sequence[tuple[tuple[int, float], ...]]) -> None:
    """Add each row's `logit_bias` to `logits` [E, V], in place. Ids outside the vocabulary name no token."""
    vocab = logits.shape[1]
    pairs = [
        (row * vocab + token, bias)
        for row, bias_of in enumerate(biases)
        for token, bias in bias_of
        if 0 <= token < vocab
    ]
    if pairs:
        places = on_device([place for place, _ in pairs], torch.int64, logits.device)
        values = on_device([bias for _, bias in pairs], logits.dtype, logits.device)
        logits.view(-1).index_add_(0, places, values)


def mask(logits: Tensor, masked: Sequence[Sequence[int]]) -> None:
    """Set each row's `masked` ids to -inf in `logits` [E, V], in place. Ids outside the vocabulary name no token."""
    vocab = logits.shape[1]
    places = [row * vocab + token for row, tokens in enumerate(masked) for token in tokens if 0 <= token < vocab]
    if places:
        logits.view(-1).index_fill_(0, on_device(places, torch.int64, logits.device), float("-inf"))


def penalise(logits: Tensor, params: Sequence[SamplingParams], states: Sequence[PenaltyState]) -> Tensor:
    """The logits [E, V] after each row's penalties, as a new tensor.

    Repetition (Keskar et al., CTRL, arXiv:1909.05858): positive logits of seen tokens are divided by the penalty,
    negative ones multiplied. Then the OpenAI API's two: minus frequency * count, minus presence where count > 0.
    """

    def column(value: Callable[[SamplingParams], float]) -> Tensor:
        return on_device([value(p) for p in params], logits.dtype, logits.device).unsqueeze(1)

    seen = torch.stack([state.seen for state in states])
    counts = torch.stack([state.counts for state in states])
    repetition = column(lambda p: p.repetition_penalty)
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - counts * column(lambda p: p.frequency_penalty)
    return logits - (counts > 0) * column(lambda p: p.presence_penalty)
