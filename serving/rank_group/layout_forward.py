"""A forward pass whose ranks share one model: weights by heads and widths, layers by stages (serving.forward.forward).

The leader gives all ranks the same batch and computes its own share of it; each writes its part of the group's KV.

Shapes: R rows of the batch whose logits or hidden states are wanted, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.forward import ByLogits
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Decoder, Planes
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout, RankPlace
from serving.rank_group.kv_share import kv_share
from serving.rank_group.layout_group import LayoutGroup
from serving.rank_group.layout_messages import LayoutDone
from serving.rank_group.parts import ToldLayers, arrived, pack
from serving.rank_group.share import LEADER


class LayoutForward(ByLogits):
    """The leader's. `model` is its share, connected to the others'; `planes` are the whole model's, shared by all."""

    def __init__(
        self, model: Decoder, spec: ModelSpec, layout: ParallelLayout, planes: Sequence[Planes], ranks: LayoutGroup
    ) -> None:
        """`spec` is the whole model's."""
        self.form = f"torch tp{layout.tensor} pp{layout.pipeline} sp{layout.sequence}"  # step costs are kept by form
        self.model, self.spec, self.layout, self.planes, self.ranks = model, spec, layout, planes, ranks
        self._own = kv_share(planes, LEADER, spec, layout)
        self._number = ranks.use_planes(partial(kv_share, planes, spec=spec, layout=layout))

    def over(self, planes: Sequence[Planes]) -> LayoutForward:
        return LayoutForward(self.model, self.spec, self.layout, planes, self.ranks)

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._computed(batch, layer_done, head=True)

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._computed(batch, layer_done, head=False).float()

    def _computed(self, batch: RaggedBatch, layer_done: LayerDone | None, *, head: bool) -> Tensor:
        """Logits [R, V], or hidden states [R, H] in the model's type."""
        come = arrived(batch, len(self.planes))
        if come is None:
            return torch.empty(len(batch.logits_rows), self.spec.vocab_size if head else self.spec.hidden)
        told = None if layer_done is None else ToldLayers(layer_done)
        # A rank takes part in the sum after a layer's attention once it has written that layer's KV; where ranks share
        # rows, one without any may be ahead of the others.
        written = None if told is None or self.layout.sequence > 1 else lambda layer: told.upto(layer + 1)
        with self.ranks.step(self._number, pack(come), head=head) as done:
            out = self.model(come, self._own, written)[batch.logits_rows]
            if head:
                out = self.model.logits(out)
        if told is not None:
            told.upto(len(self.planes))
        return out if head or self.layout.pipeline == 1 else self._of_last_stage(out, done)

    def _of_last_stage(self, own: Tensor, done: Sequence[LayoutDone]) -> Tensor:
        rows = done[gives_rows(self.layout) - 1].rows
        return torch.from_numpy(rows).view(own.dtype).view(own.shape)


def gives_rows(layout: ParallelLayout) -> int:
    """The rank whose hidden states are those of the whole model."""
    return layout.rank(RankPlace(layout.pipeline - 1, 0, 0))
