"""Sampling by the compiled CPU kernels: one call for all rows of a step.

It packs each row's parameters into the kernels' `Order` and reads tokens back; how a token is sampled it may not know.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serving.errors import InternalError
from serving.kernels import cpu
from serving.messages import TokenLogprob
from serving.sampling.penalties import PenaltyState
from serving.sampling.sampler import NOT_NUMBERS, REASONS, SampleRow


class CpuSampling:
    """Samples with `kernels`, from logits in host memory (serving.sampling.sampler.SamplingBackend)."""

    def __init__(self, kernels: cpu.Kernels):
        self.kernels = kernels

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        edits = _Edits(logits.shape[1])
        orders = [edits.order(row) for row in rows]
        return cpu.sample(self.kernels, logits, orders, edits.ids, edits.changes)

    def logprobs(self, logits: Tensor, chosen: Sequence[int], k: int) -> list[TokenLogprob]:
        found = cpu.logprobs(self.kernels, logits, chosen, min(k, logits.shape[1]))
        if found.bad.any():
            raise InternalError(REASONS[NOT_NUMBERS])
        return [
            TokenLogprob(value, tuple(zip(ids, values, strict=True)))
            for value, ids, values in zip(found.chosen.tolist(), found.ids.tolist(), found.values.tolist(), strict=True)
        ]


class _Edits:
    """What the orders of one call refer to: changes of single logits, and histories, which must outlive the call."""

    def __init__(self, vocab: int):
        self.vocab = vocab
        self.ids: list[int] = []
        self.changes: list[float] = []
        self.histories: list[PenaltyState] = []

    def order(self, row: SampleRow) -> bytes:
        params = row.params
        first, counts, seen, allowed = len(self.ids), 0, 0, 0
        if row.edited:
            self._change(params.logit_bias)
            self._change([(token, float("-inf")) for token in row.masked_tokens])
            if params.penalised:
                history = row.counted(self.vocab)
                self.histories.append(history)
                counts, seen = history.counts.data_ptr(), history.seen.data_ptr()
        if row.allowed is not None:
            allowed = row.allowed.address
        return cpu.ORDER.pack(
            params.seed,
            row.position,
            counts,
            seen,
            allowed,
            params.top_p,
            params.min_p,
            0.0 if row.greedy else params.temperature,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            min(params.top_k, self.vocab),
            first,
            len(self.ids) - first,
            0 if row.allowed is None else row.allowed.tokens,
        )

    def _change(self, pairs: Sequence[tuple[int, float]]) -> None:
        """Ids outside the vocabulary name no token."""
        for token, change in pairs:
            if 0 <= token < self.vocab:
                self.ids.append(token)
                self.changes.append(change)
