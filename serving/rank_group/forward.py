"""A forward pass over a batch of which each rank of a group computes some sequences (serving.forward.forward.Forward).

The leader computes its own part, and the head for all. Hidden states of rows come back from the others; their KV is
where it belongs, in memory that all share.

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
from serving.rank_group.division import divided
from serving.rank_group.parts import BatchPart, ToldLayers, arrived, pack, part_of_batch
from serving.rank_group.ranks import RankGroup


class GroupForward(ByLogits):
    """The leader's. `model` is its share, its experts joined to the group's exchange; `planes` are shared ones."""

    def __init__(self, model: Decoder, planes: Sequence[Planes], ranks: RankGroup) -> None:
        self.form = f"torch x{ranks.configured}"  # the bits of torch, in other times: step costs are kept by form
        self.model, self.planes, self.ranks = model, planes, ranks
        self._number = ranks.use_planes(planes)

    def over(self, planes: Sequence[Planes]) -> GroupForward:
        return GroupForward(self.model, planes, self.ranks)

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.model.logits(self._rows(batch, layer_done))

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self._rows(batch, layer_done).float()

    def _rows(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """Hidden states [R, H] of `batch.logits_rows`, in the model's type."""
        weight = self.model.norm.weight
        out = weight.new_empty(len(batch.logits_rows), len(weight))
        come = arrived(batch, len(self.planes))
        if come is None:
            return out
        told = None if layer_done is None else ToldLayers(layer_done)
        written = None if told is None else partial(self._exchanged, told)
        self.ranks.step(lambda: self._computed(come, out, written))
        if told is not None:
            told.upto(len(self.planes))
        return out

    def _exchanged(self, told: ToldLayers, layer: int) -> None:
        """A rank takes part in a MoE layer's exchange once it has written that layer's KV, and that of those before."""
        if self._sparse()[layer]:
            told.upto(layer + 1)

    def _computed(self, batch: RaggedBatch, out: Tensor, written: LayerDone | None) -> None:
        """The rows that the ranks there are compute, each its part, into `out`."""
        own, *others = self._parts(batch)
        assert own is not None, "the leader has a part in every step"
        packed = [None if part is None else pack(part.batch) for part in others]
        with self.ranks.beside(self._number, packed) as done:
            out[own.places] = self.model(own.batch, self.planes, written)[own.batch.logits_rows]
        for part, word in zip(others, done, strict=True):
            if part is not None and len(part.places):
                out[part.places] = torch.from_numpy(word.rows).view(out.dtype).view(-1, out.shape[1])

    def _parts(self, batch: RaggedBatch) -> list[BatchPart | None]:
        """Each rank's part; None where it has none. KV in host memory is the leader's alone."""
        if batch.offloaded is not None or len(batch.query_lens) == 1:
            whole = BatchPart(batch, torch.arange(len(batch.logits_rows)))
            return [whole, *[None] * (self.ranks.size - 1)]
        shares = divided(batch.query_lens, batch.context_lens_list, self.ranks.size)
        return [part_of_batch(batch, share) if share else None for share in shares]

    def _sparse(self) -> Sequence[bool]:
        assert self.model.spec.moe is not None
        return self.model.spec.moe.sparse
