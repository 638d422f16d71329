"""The protocol of a forward pass over a ragged batch, and its plainest form, the model's own modules.

The compiled forms (CpuForward, TritonForward) have files of their own; `choose.make_forward` picks one. A form writes
the batch's KV and returns logits or hidden states; it knows no sequences, leases or sampling.

Shapes: R rows of the batch whose logits or hidden states are wanted, V vocabulary, H hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.layer_events import LayerDone, layer_notifier
from serving.model.decoder import Decoder, Planes


class Forward(Protocol):
    """Computes batches over the KV planes it was made with.

    `form` names the arithmetic: workers of equal `form` compute equal bits, if the form is deterministic at all.
    `layer_done(layer)`, where given, is called on any thread once that layer's KV of the batch is written. A batch may
    hold KV in host memory (`batch.offloaded`), or wait for earlier KV layer by layer (`batch.barrier`); where the step
    leaves at the barrier, what it returns means nothing.
    """

    form: str

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """Logits [R, V] float32 for `batch.logits_rows`, in memory of the caller's own."""

    def over(self, planes: Sequence[Planes]) -> Forward:
        """The same computation over other KV planes, of any number of blocks and KV dtype; weights are shared.

        The two compute one after the other. Raises ValueError for planes this form cannot take.
        """

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """The token [R] int64 of the highest logit for each of `batch.logits_rows`, the lowest id among equals.

        -1 where that logit is not finite.
        """

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The same, and the logits [len(rows), V] of these of the R rows, ascending; valid until the next step."""

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """Hidden states [R, H] float32 after the final norm of `batch.logits_rows`, in memory of the caller's own."""


class ByLogits(ABC):
    """Best tokens of a forward pass that makes all logits in any case."""

    @abstractmethod
    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """As `Forward.logits`."""

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return best_tokens(self.logits(batch, layer_done))

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(batch, layer_done)
        return best_tokens(logits), logits[rows]


class EagerForward(ByLogits):
    """The model's modules, one operation after another: any model, any device."""

    form = "torch"

    def __init__(self, model: Decoder, planes: Sequence[Planes]):
        self.model = model
        self.planes = planes
        self.notify_layers = layer_notifier(len(planes), planes[0][0].device)

    def over(self, planes: Sequence[Planes]) -> EagerForward:
        return EagerForward(self.model, planes)

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.model.logits(self._rows(batch, layer_done))

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._rows(batch, layer_done).float()

    def _rows(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        with nullcontext() if layer_done is None else self.notify_layers(layer_done) as written:
            hidden: Tensor = self.model(batch, self.planes, written)
            return hidden[batch.logits_rows]


def best_tokens(logits: Tensor) -> Tensor:
    """The best token [R] of each row [R, V], the lowest id among equals; -1 where the best logit is not finite."""
    peaks, tokens = logits.max(dim=-1)
    return tokens.where(peaks.isfinite(), -1)
