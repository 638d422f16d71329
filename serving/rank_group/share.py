"""What each rank of a group loads: attention, routers and shared experts as all do, and of the experts its own alone.

Experts are spread evenly, layer by layer alike, and some have copies if that is asked for. Only the leader has the
head: the others give it hidden states.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import nn

from serving.expert_parallel.layer import check_alike, hold_experts
from serving.expert_parallel.surviving import Placements
from serving.loader.loading import LoadedModel, load
from serving.model.decoder import Decoder
from serving.model.expert_balance import Layout, placed
from serving.model.spec import ModelSpec

LEADER = 0


def even_placements(spec: ModelSpec, ranks: int, redundant: int = 0) -> Placements:
    """One for each MoE layer. `redundant` experts and more, where ranks do not divide them, have copies.

    No expert has two copies on one rank, unless all have one on every rank. Raises ValueError for a dense model.
    """
    if spec.moe is None:
        raise ValueError("the model has no experts to spread")
    slots = min(-(-(spec.moe.experts + redundant) // ranks), spec.moe.experts)
    placement = placed([1.0] * spec.moe.experts, Layout(ranks=ranks, slots=slots))
    return (placement,) * sum(spec.moe.sparse)


def refuse_dense(spec: ModelSpec, ranks: int) -> None:
    """Raises ValueError for a model that has no experts to spread over so many ranks."""
    if spec.moe is None:
        raise ValueError(
            f"--data-parallel-size {ranks}: {spec.architecture} has no experts to spread over ranks; more workers,"
            f" --mixed {ranks}, serve more copies of a dense model"
        )


def load_share(
    path: Path, dtype: str, rank: int, ranks: int, redundant: int = 0, quantization: str | None = None
) -> LoadedModel:
    """The model at `path` with the experts of this rank. Raises ValueError as `load` does."""
    layout = partial(hold_spread, rank=rank, ranks=ranks, redundant=redundant)
    loaded = load(path, dtype, quantization=quantization, layout=layout)
    if rank != LEADER:
        _without_head(loaded.model)  # a tied one is made anew by loading
    return loaded


def hold_spread(model: Decoder, rank: int, ranks: int, redundant: int) -> None:
    """Take off `model`, in place, the experts of other ranks. Raises ValueError for experts that are not alike."""
    check_alike(model)
    hold_experts(model, even_placements(model.spec, ranks, redundant), rank)
    if rank != LEADER and not model.spec.tied_embeddings:
        _without_head(model)


def _without_head(model: Decoder) -> None:
    model.set_submodule("head", nn.Identity())
