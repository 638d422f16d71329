"""What a rank that shares a model with others does, the leader included: loads its share, and connects it to theirs.

It computes what it is given, and knows nothing of sequences.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from serving.loader.loading import LoadedModel, load
from serving.model.decoder import Decoder, Planes
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from serving.rank_group.layout_forward import gives_rows
from serving.rank_group.messages import RunStep, StepDone
from serving.rank_group.parts import unpack
from serving.rank_group.shared_planes import MappedPlanes


def load_layout_share(
    path: Path, dtype: str, layout: ParallelLayout, rank: int, quantization: str | None = None
) -> LoadedModel:
    """The rank's rows, columns and layers of the model at `path`. Raises ValueError as `load` does."""
    return load(path, dtype, quantization=quantization, layout=partial(hold_share, layout=layout, rank=rank))


def connect(model: Decoder, layout: ParallelLayout, rank: int, store: FileStore, deadline: float) -> ParallelRank:
    """Meet the other ranks, and let `model` compute with theirs. Raises RankLost, StoreUnavailable."""
    ranks = ParallelRank.join(layout, rank, store, deadline=deadline)
    apply_parallel(model, ranks)
    return ranks


class LayoutRank:
    """A rank but the leader, connected to the others: computes its share of each step."""

    def __init__(self, model: Decoder, ranks: ParallelRank, kv: MappedPlanes) -> None:
        self.model, self.ranks, self.kv = model, ranks, kv
        self.planes: list[list[Planes]] = []
        self._gives_rows = gives_rows(ranks.layout) == ranks.rank

    @torch.inference_mode()
    def run(self, step: RunStep) -> StepDone:
        """Raises RankLost."""
        assert step.part is not None, "ranks that share a model compute every step"
        batch = unpack(step.part)
        out = self.model(batch, self.planes[step.planes])[batch.logits_rows]
        if step.head:
            self.model.logits(out)
        given = out if self._gives_rows and not step.head else out.new_empty(0)
        return StepDone(step.number, given.flatten().view(torch.uint8).numpy(), self.ranks.traffic)
