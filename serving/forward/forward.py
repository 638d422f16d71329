"""How a worker computes a ragged batch: through the model's own modules, or as one call into compiled kernels.

Each form writes the batch's KV and scores the rows that were asked for. None knows sequences, leases or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.layer_events import LayerDone, layer_teller
from serving.model.decoder import Decoder, Planes


class Forward(Protocol):
    """Computes a batch. Workers of equal `form` compute equal bits, if the form is deterministic at all.

    `layer_done(layer)` is called, on any thread, once that layer's KV of the batch is written.
    """

    form: str

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """Scores [R, V] float32 for `batch.logits_rows`."""
        ...

    def over(self, planes: Sequence[Planes]) -> Forward:
        """The same computation over KV planes that may be kept otherwise; weights are shared.

        The two compute one after the other. Raises ValueError where it cannot be had.
        """
        ...

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """The best-scored token [R] int64 for each of `batch.logits_rows`, the lowest id among equals.

        -1 where no score is a finite number.
        """
        ...


class EagerForward:
    """The model's modules, one operation after another: any model, any device."""

    form = "torch"

    def __init__(self, model: Decoder, planes: Sequence[Planes]):
        self.model = model
        self.planes = planes
        self.layers = layer_teller(len(planes), planes[0][0].device)

    def over(self, planes: Sequence[Planes]) -> EagerForward:
        return EagerForward(self.model, planes)

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        with nullcontext() if layer_done is None else self.layers.telling(layer_done) as written:
            hidden = self.model(batch, self.planes, written)
            return self.model.logits(hidden[batch.logits_rows])

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        peaks, tokens = self.logits(batch, layer_done).max(dim=-1)
        return tokens.where(peaks.isfinite(), -1)
