"""The leader's way from a path to a model that its ranks share by weights or by layers, and to a forward pass of all.

Which models can be served so is said here too. It knows neither workers nor their configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import RankLost
from serving.loader.loading import LoadedModel, open_checkpoint
from serving.loader.rotations import refuse_rotations
from serving.model.decoder import Planes
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout
from serving.rank_group.layout_forward import LayoutForward
from serving.rank_group.layout_group import LayoutGroup
from serving.rank_group.layout_rank import connect, load_layout_share
from serving.rank_group.loading import load_together
from serving.rank_group.share import LEADER, refuse_dense

log = logging.getLogger(__name__)

FLAGS = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "sequence": "--prefill-context-parallel-size",
}
SPREAD = "--data-parallel-size"  # of ranks that share a step's rows, and hold some experts each


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedModel(LoadedModel):
    """The leader's share of a model of which each rank holds some heads, widths or layers. `spec` is the whole's.

    Close `ranks` when no step runs any more.
    """

    layout: ParallelLayout
    ranks: LayoutGroup


def flags_of(layout: ParallelLayout) -> str:
    """How the layout is asked for."""
    flags = _flags(layout)
    return " ".join(f"{flag} {getattr(layout, form)}" for form, flag in flags.items() if getattr(layout, form) > 1)


def _flags(layout: ParallelLayout) -> dict[str, str]:
    return FLAGS | ({"sequence": SPREAD} if layout.spread_experts else {})


def check_layout(path: Path, dtype: str, quantization: str | None, layout: ParallelLayout) -> None:
    """Raises ValueError, with what to do, for a model at `path` that ranks of this layout cannot share."""
    spec, checkpoint, _ = open_checkpoint(path)
    if layout.spread_experts:
        refuse_dense(spec, layout.ranks)
    fitting = ParallelLayout(spread_experts=layout.spread_experts)
    for form, flag in _flags(layout).items():
        asked = getattr(layout, form)
        if (reason := _unfit(_asked(fitting, form, asked), spec)) is not None:
            sizes = range(min(asked, max(spec.layers, spec.heads)), 0, -1)
            most = next(one for one in sizes if _unfit(_asked(fitting, form, one), spec) is None)
            raise ValueError(f"{flag} {asked}: {reason.partition(': ')[2]}; choose {most} or less")
        fitting = _asked(fitting, form, asked)
    refuse_rotations(path)
    if checkpoint.float8:
        raise ValueError(f"{flags_of(layout)}: ranks share no FP8 weights: use a checkpoint in BF16 or INT8")
    if quantization == "int8" and not checkpoint.int8_names:
        raise ValueError(
            f"--quantization int8: {layout.ranks} ranks load parts of the model, which cannot be quantized then; write"
            " it in INT8 with `millrace quantize` first, and serve that"
        )


def _asked(layout: ParallelLayout, form: str, ranks: int) -> ParallelLayout:
    """The layout with so many ranks in this form."""
    sizes: dict[str, Any] = {form: ranks}
    return replace(layout, **sizes)


def _unfit(layout: ParallelLayout, spec: ModelSpec) -> str | None:
    try:
        layout.check(spec)
    except ValueError as error:
        return str(error)
    return None


def load_layout(
    path: Path, dtype: str, quantization: str | None, layout: ParallelLayout, deadline: float
) -> DividedModel:
    """Load the model at `path` over the processes of `layout`, this one among them; a stage's share its threads.

    `deadline` are the seconds that a rank may keep others waiting in a step. Raises ValueError as `load` does, and
    where the ranks cannot work together.
    """
    check_layout(path, dtype, quantization, layout)
    torch.set_num_threads(max(1, torch.get_num_threads() // layout.head_ranks))  # stages compute one after the other
    group = LayoutGroup(layout, deadline)

    def own() -> LoadedModel:
        return load_layout_share(group.share_of(LEADER, path, dtype), quantization)

    return load_together(group, path, dtype, own, partial(DividedModel, ranks=group, layout=layout))


def join_layout(divided: DividedModel, planes: Sequence[Planes]) -> LayoutForward:
    """The forward pass of all ranks over `planes` (LayoutGroup.share_planes).

    Raises ValueError where the ranks do not come together.
    """
    model, layout, ranks = divided.model, divided.layout, divided.ranks
    try:
        ranks.meet(lambda store: connect(model, layout, LEADER, store, ranks.deadline))
        return LayoutForward(model, divided.spec, layout, planes, ranks)
    except (RankLost, StoreUnavailable) as error:
        raise ValueError(f"the ranks of this worker do not come together: {error}") from error
