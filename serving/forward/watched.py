"""A forward pass whose hidden states another part goes on from: the layer that predicts further tokens.

They are those after the final norm, of every token of the last batch, whether its logits were wanted or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.forward import EagerForward
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Decoder, Planes


class WatchedForward(EagerForward):
    """Keeps the `last` [T, H] of the batch it has computed last. Over other planes nobody watches."""

    def __init__(self, model: Decoder, planes: Sequence[Planes]):
        super().__init__(model, planes)
        self.last: Tensor | None = None

    def _rows(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        with nullcontext() if layer_done is None else self.notify_layers(layer_done) as written:
            self.last = self.model(batch, self.planes, written)
            return self.last[batch.logits_rows]
