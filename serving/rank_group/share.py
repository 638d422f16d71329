"""What each rank of a group loads: attention, routers and shared experts as all do, and of the experts its own alone.

Experts are spread evenly, layer by layer alike. Only the leader has the head: the others give it hidden states.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from serving.expert_parallel.layer import hold_experts
from serving.loader.loading import LoadedModel, load
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement, Layout, placed
from serving.model.spec import ModelSpec

LEADER = 0


def even_placements(spec: ModelSpec, ranks: int) -> list[ExpertPlacement]:
    """One for each MoE layer; where ranks do not divide the experts, some have copies. Raises ValueError for none."""
    if spec.moe is None:
        raise ValueError("the model has no experts to spread")
    slots = -(-spec.moe.experts // ranks)
    placement = placed([1.0] * spec.moe.experts, Layout(ranks=ranks, slots=slots))
    return [placement] * sum(spec.moe.sparse)


def load_share(path: Path, dtype: str, rank: int, ranks: int, quantization: str | None = None) -> LoadedModel:
    """The model at `path` with the experts of this rank. Raises ValueError as `load` does."""
    loaded = load(path, dtype, quantization=quantization, layout=partial(_hold_share, rank=rank, ranks=ranks))
    if rank != LEADER:
        _without_head(loaded.model)  # a tied one is made anew by loading
    return loaded


def _hold_share(model: Decoder, rank: int, ranks: int) -> None:
    hold_experts(model, even_placements(model.spec, ranks), rank)
    if rank != LEADER and not model.spec.tied_embeddings:
        _without_head(model)


def _without_head(model: Decoder) -> None:
    model.set_submodule("head", nn.Identity())
