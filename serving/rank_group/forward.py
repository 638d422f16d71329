"""A forward pass over a batch of which each rank of a group computes some sequences (serving.forward.forward.Forward).

The leader computes its own part, and the head for all. Hidden states of rows come back from the others; their KV is
where it belongs, in memory that all share.

Shapes: R rows of the batch whose logits or hidden states are wanted, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Planes
from serving.rank_group.computing import RankComputing, TorchComputing
from serving.rank_group.division import divided
from serving.rank_group.parts import BatchPart, ToldLayers, arrived, pack, part_of_batch
from serving.rank_group.ranks import RankGroup
from serving.sampling.sampler import Sampler


class GroupForward:
    """The leader's. `computing` is its own part; `planes` are shared ones."""

    def __init__(self, computing: RankComputing, planes: Sequence[Planes], ranks: RankGroup) -> None:
        self.form = f"{computing.form} x{ranks.configured}"  # its bits, in other times: step costs are kept by form
        self.computing, self.planes, self.ranks = computing, planes, ranks
        self._number, self._steps = ranks.use_planes(planes), computing.over(planes)

    def over(self, planes: Sequence[Planes]) -> GroupForward:
        return GroupForward(self.computing, planes, self.ranks)

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.computing.logits(self._rows(batch, layer_done))

    def greedy(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.computing.greedy(self._rows(batch, layer_done))

    def greedy_and_logits(
        self, batch: RaggedBatch, layer_done: LayerDone | None, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return self.computing.greedy_and_logits(self._rows(batch, layer_done), rows)

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.computing.hidden(self._rows(batch, layer_done))

    @property
    def compiled(self) -> bool:
        """Whether kernels compute, which take torch's threads away."""
        return not isinstance(self.computing, TorchComputing)

    def sampler(self) -> Sampler:
        """What draws from its logits."""
        return self.computing.sampler()

    def _rows(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        """What the head goes on from, [R, H] of `batch.logits_rows`."""
        out = self.computing.new_rows(len(batch.logits_rows))
        come = arrived(batch, len(self.planes))
        if come is None:
            return out
        told = None if layer_done is None else ToldLayers(layer_done)
        written = None if told is None else lambda layer: told.upto(layer + 1)
        self.ranks.step(lambda: self._computed(come, out, written))
        if told is not None:
            told.upto(len(self.planes))
        return out

    def _computed(self, batch: RaggedBatch, out: Tensor, written: LayerDone | None) -> None:
        """The rows that the ranks there are compute, each its part, into `out`."""
        own, *others = self._parts(batch)
        assert own is not None, "the leader has a part in every step"
        packed = [None if part is None else pack(part.batch) for part in others]
        with self.ranks.beside(self._number, packed) as done:
            out[own.places] = self._steps.rows(own.batch, written)
        for part, word in zip(others, done, strict=True):
            if part is not None and len(part.places):
                out[part.places] = torch.from_numpy(word.rows).view(out.dtype).view(-1, out.shape[1])

    def _parts(self, batch: RaggedBatch) -> list[BatchPart | None]:
        """Each rank's part; None where it has none. KV in host memory is the leader's alone, and of no other host."""
        if batch.offloaded is not None or len(batch.query_lens) == 1:
            whole = BatchPart(batch, torch.arange(len(batch.logits_rows)))
            return [whole, *[None] * (self.ranks.size - 1)]
        shares = divided(batch.query_lens, batch.context_lens_list, self.ranks.mapping)
        parts = [part_of_batch(batch, share) if share else None for share in shares]
        return [*parts, *[None] * (self.ranks.size - self.ranks.mapping)]
