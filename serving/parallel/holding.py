"""Leaves of a decoder what one rank holds: its layers, and its rows and columns of their parameters.

For a model on meta, before its checkpoint is read, as well as for one with weights. Nothing is exchanged yet: what a
rank computes with its share is of use only with `serving.parallel.applying`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from serving.checkpoint.cuts import Cut
from serving.expert_parallel.layer import check_alike, moe_layers
from serving.model.decoder import Attention, Decoder, Layer
from serving.model.quantized_linear import QuantizedLinear
from serving.parallel.layout import ParallelLayout
from serving.parallel.parameters import parameter_cut


class StageLayers(nn.ModuleList):
    """Layers under the numbers they have in the whole model, as checkpoints name them."""

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in layers:
            self.add_module(str(number), layer)


class Absent(nn.Module):
    """Stands where other ranks have a module with a weight."""

    weight = None


def hold_share(model: Decoder, layout: ParallelLayout, rank: int) -> dict[str, Cut]:
    """Take off `model`, in place, what other ranks hold; what is left of each parameter that was cut.

    For `serving.loader.loading.load`, as its `layout` with the other arguments bound. Raises ValueError where the
    layout does not fit the model.
    """
    spec = model.spec
    layout.check(spec)
    if layout.spread_experts:
        check_alike(model)
    _hold_experts(model, layout.experts(spec, rank))
    held = {name: parameter_cut(layout, spec, rank, name) for name, _ in model.named_parameters()}
    layers = layout.layers(spec, rank)
    model.layers = StageLayers((number, model.layers[number]) for number in layers)
    _drop_outer(model, layout, rank)
    cuts = {}
    for name, parameter in list(model.named_parameters()):
        cut = held[name]
        assert cut is not None, f"{name} is on the wrong stage"
        if _covers(cut, parameter):
            continue
        cuts[name] = cut
        owner, leaf = name.rsplit(".", 1)
        part = nn.Parameter(taken(parameter.detach(), cut), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, part)
    for module in model.modules():
        _measure(module)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.attention, Attention):
            layer.attention.heads = len(layout.heads(spec, rank))
            layer.attention.kv_heads = len(layout.kv_heads(spec, rank))
    model.tie_weights()
    return cuts


def taken(whole: Tensor, cut: Cut) -> Tensor:
    """What the cut has of a whole parameter, in memory of its own."""
    rows = whole if cut.rows is None else torch.cat([whole[held.start : held.stop] for held in cut.rows])
    return rows.clone() if cut.columns is None else rows[:, cut.columns.start : cut.columns.stop].clone()


def _covers(cut: Cut, whole: Tensor) -> bool:
    """True if nothing is cut off."""
    rows = range(len(whole)) if cut.rows is None else range(cut.rows[0].start, cut.rows[-1].stop)
    gaps = () if cut.rows is None else zip(cut.rows, cut.rows[1:], strict=False)
    every_row = rows == range(len(whole)) and all(one.stop == other.start for one, other in gaps)
    return every_row and (cut.columns is None or cut.columns == range(whole.shape[1]))


def _hold_experts(model: Decoder, held: range) -> None:
    """Leave mixtures these experts, under the numbers they have in the whole model."""
    for _, mlp in moe_layers(model):
        if len(held) < mlp.spec.experts:
            kept = {str(expert): mlp.experts[expert] for expert in held}
            mlp.experts = nn.ModuleDict(kept)  # type: ignore[assignment]


def _drop_outer(model: Decoder, layout: ParallelLayout, rank: int) -> None:
    """Take the modules beside the layers off a stage that has no part in them."""
    first, last, tied = layout.is_first(rank), layout.is_last(rank), model.spec.tied_embeddings
    embeds = first or (last and tied)
    if not first:
        model.positions, model.embedding_scale = None, nn.Identity()
    if not embeds:
        model.set_submodule("embed", Absent())
    if not last:
        model.set_submodule("norm", Absent())
    if not (embeds if tied else last):
        model.set_submodule("head", Absent())


def _measure(module: nn.Module) -> None:
    """Let a module that has been cut know its size."""
    if isinstance(module, nn.Linear | QuantizedLinear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = len(module.weight)
