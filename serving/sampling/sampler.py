"""From logits to tokens: greedy choice, temperature, min-p, top-k, top-p, and log-probabilities.

A row's token depends on its own logits, parameters, tokens and (seed, position) alone, to the bit: rows are worked
on together, but no number of one row ever comes from an operation whose order depends on the others. Nothing here
knows of schedulers, sequences' blocks or text; a `SamplingBackend` computes, with torch or compiled kernels.

The draw: the kept tokens in the order of their ids, each as wide as its probability; one uniform number of
(seed, position) falls on one of them. Id order, and not probability order, because logits recomputed on another
worker differ in their last bits: that shifts the borders between ids by as little, but may swap two near-equal ranks.

Tokens are ranked by logit (after edits and temperature), best first, and equal logits by id, lowest first. Min-p keeps
tokens of at least min_p times the best one's probability; top-k the k best; top-p the fewest whose share of what the
first two kept reaches top_p.

Shapes: R rows of the call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serving.batch.device_copy import on_device
from serving.errors import InternalError
from serving.grammar.grammars import Allowed
from serving.messages import SamplingParams, TokenLogprob
from serving.sampling.penalties import PenaltyState

GREEDY_BELOW = 1e-5  # a lower temperature is greedy, as in vLLM

# What a backend returns where no token can be sampled.
NOT_NUMBERS = -1  # NaN or +inf
ALL_MASKED = -2

REASONS = {
    NOT_NUMBERS: "the model returned logits that are not numbers",
    ALL_MASKED: "every token is masked: there is none to choose",
}


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to sample: the parameters and everything the draw may depend on besides the logits.

    `position` is the sampled token's absolute position in its sequence. With penalties, `state` saves counting the
    history again at each step: a `PenaltyState` of the same prompt, which the sampler brings up to `output_tokens`.
    `allowed`: no other tokens may be drawn, whatever their logits; None allows all.
    """

    params: SamplingParams
    position: int
    output_tokens: Sequence[int]
    prompt_tokens: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()
    state: PenaltyState | None = None
    allowed: Allowed | None = None

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def stops_masked(self) -> bool:
        """True if the output is too short to end; one whose grammar allows nothing else may."""
        early, allowed = len(self.output_tokens) < self.params.min_tokens, self.allowed
        if not early or allowed is None:
            return early
        return not allowed.ended and not allowed.none_but(self.eos_token_ids + self.params.stop_token_ids)

    @property
    def masked_tokens(self) -> tuple[int, ...]:
        """Tokens that must not be sampled yet; ids outside the vocabulary name none."""
        return self.eos_token_ids + self.params.stop_token_ids if self.stops_masked else ()

    @property
    def edited(self) -> bool:
        """True if the logits are changed before sampling."""
        return bool(self.params.logit_bias) or self.stops_masked or self.params.penalised

    def counted(self, vocab: int, device: torch.device | str = "cpu") -> PenaltyState:
        """The history as penalties need it: `state` or a new one, brought up to the output so far."""
        state = self.state or PenaltyState(self.prompt_tokens, vocab, device)
        state.follow(self.output_tokens)
        return state


@dataclass(slots=True)  # not frozen: one for every token, and frozen ones take three times as long to make
class Sampled:
    """A sampled token, with its log-probability when the row asked for it."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class SamplingFailed:
    """No token can be sampled from this row; the other rows of the call are not touched by it."""

    reason: str

    def error(self) -> InternalError:
        return InternalError(self.reason)


def sampled(token: int) -> Sampled | SamplingFailed:
    """What a backend's or a forward's token, or the negative number instead, stands for."""
    return Sampled(token) if token >= 0 else SamplingFailed(REASONS[token])


class SamplingBackend(Protocol):
    """Samples as this module's docstring describes. Two backends may differ where the uniform number, or top-p, falls
    on the border between two tokens to within float32 rounding."""

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """A token for each row of `logits` [R, V] float32, which are left unchanged; NOT_NUMBERS or ALL_MASKED."""
        ...

    def logprobs(self, logits: Tensor, chosen: Sequence[int], k: int) -> list[TokenLogprob]:
        """The log-probability of token `chosen` [R] of each row of `logits` [R, V], and the `k` best, best first.

        Raises:
            InternalError: a row holds NaN or +inf, or nothing but -inf.
        """
        ...


class Sampler:
    """Samples one token for each row of logits. Holds nothing between calls."""

    def __init__(self, backend: SamplingBackend):
        self.backend = backend

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | SamplingFailed]:
        """One result for each row of `logits` [R, V] float32, in order.

        A row with NaN or +inf, or with every token masked, is answered with `SamplingFailed`.
        """
        assert logits.dtype == torch.float32 and logits.shape[0] == len(rows), "one float32 row of logits each"
        if not rows:
            return []
        tokens = self.backend.sample(logits, rows)
        results = [sampled(token) for token in tokens]
        self._add_logprobs(results, logits, tokens, rows)
        return results

    def _add_logprobs(
        self, results: list[Sampled | SamplingFailed], logits: Tensor, tokens: Sequence[int], rows: Sequence[SampleRow]
    ) -> None:
        """Give the rows that asked for it the log-probabilities of their raw logits."""
        groups: dict[int, list[int]] = {}
        for r, row in enumerate(rows):
            if row.params.logprobs is not None and tokens[r] >= 0:
                groups.setdefault(row.params.logprobs, []).append(r)
        for k, group in groups.items():
            values = self.backend.logprobs(take(logits, group), [tokens[r] for r in group], k)
            for r, value in zip(group, values, strict=True):
                results[r] = Sampled(tokens[r], value)


def take(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows of a tensor, in rising order: itself, not a copy, when they are all of them."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, on_device(rows, torch.int64, tensor.device))
