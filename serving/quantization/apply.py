"""Finds INT8 scales for a built decoder, and applies them: smoothing absorbed by what comes before, layers replaced.

It changes a model from outside and knows how a decoder's parts hang together; where scales are kept it does not know.

What feeds a linear layer absorbs the smoothing of its inputs, so that the function stays the same: a norm divides its
weight (qkv, gate_up, up, an untied head), the rows of v in qkv theirs (o; shared by the query heads of a group), the
rows of up theirs (down, where the gate multiplies: a plain activation does not let a factor through).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serving.model.decoder import Decoder, GatedMlp, Layer, LayerNorm, RmsNorm
from serving.model.quantized_linear import QuantizedLinear
from serving.quantization.calibrate import Seen, activations
from serving.quantization.scheme import Found, Int8Scheme, Scales
from serving.quantization.search import clipped_scales, rounded, smoothing


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSite:
    """A linear layer, and what can absorb the smoothing of its inputs: a norm, or the last rows of another linear."""

    name: str
    norm: RmsNorm | LayerNorm | None = None
    feeder: str | None = None  # a linear layer; its last rows, as many as there are inputs / shared, make the inputs
    shared: int = 1  # how many inputs one row of the feeder makes
    head_dim: int = 1  # inputs of one head, where they are shared


def places(model: Decoder, scheme: Int8Scheme) -> Iterator[LinearSite]:
    """The linear layers that `scheme` quantizes."""
    spec = model.spec
    wanted = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not scheme.keeps(name, spec.layers)
    }
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        at, gated = f"layers.{index}", isinstance(layer.mlp, GatedMlp)
        qkv, up = f"{at}.attention.qkv", f"{at}.mlp.gate_up" if gated else f"{at}.mlp.up"
        group = spec.heads // spec.kv_heads
        found = (
            LinearSite(name=qkv, norm=layer.attention_norm),
            LinearSite(
                name=f"{at}.attention.o",
                feeder=qkv if qkv in wanted else None,
                shared=group,
                head_dim=spec.head_dim,
            ),
            LinearSite(name=up, norm=layer.mlp_norm),
            LinearSite(name=f"{at}.mlp.down", feeder=up if gated and up in wanted else None),
        )
        yield from (place for place in found if place.name in wanted)
    if "head" in wanted:
        yield LinearSite(name="head", norm=model.norm)


def quantize_model(model: Decoder, scheme: Int8Scheme, calibration: Sequence[Sequence[int]] | None) -> Decoder:
    """Quantize `model` in place, with scales found on the `calibration` token sequences, and return it.

    Without calibration nothing is smoothed, and clipping looks at the weights alone.
    """
    return apply_scales(model, scheme, find_scales(model, scheme, calibration))


@torch.no_grad()
def find_scales(model: Decoder, scheme: Int8Scheme, calibration: Sequence[Sequence[int]] | None) -> dict[str, Scales]:
    """The scales of every layer that `scheme` quantizes. The model is left as it is."""
    wanted = list(places(model, scheme))
    seen = {}
    if calibration:
        seen = activations(model, calibration, [place.name for place in wanted], scheme.rows)
    found = {}
    for place in wanted:
        linear = model.get_submodule(place.name)
        assert isinstance(linear, nn.Linear)
        weight = linear.weight.float()
        if place.name not in seen:
            found[place.name] = Scales(smoothing=None, scale=clipped_scales(weight, scheme.clips).cpu())
            continue
        given = seen.pop(place.name)
        x, chosen = given.rows, _smoothing(place, given, weight, scheme)
        smooth_x, smooth_weight = (x, weight) if chosen is None else (x / chosen, weight * chosen)
        token_size = (x @ weight.t()).norm(dim=-1, keepdim=True).clamp_min(1e-12)
        scale = clipped_scales(smooth_weight, scheme.clips, smooth_x / token_size)
        found[place.name] = Scales(smoothing=None if chosen is None else chosen.cpu(), scale=scale.cpu())
    return found


def _smoothing(place: LinearSite, seen: Seen, weight: Tensor, scheme: Int8Scheme) -> Tensor | None:
    """The best smoothing that what feeds this layer can absorb; None where nothing can."""
    if place.norm is not None:
        best = smoothing(seen.rows, seen.sizes, weight, scheme.strengths)
        # What is stored of the divided norm is rounded: the weight is multiplied by what the norm was truly divided by.
        old = place.norm.weight.float()
        new = (old / best).to(place.norm.weight.dtype).float()
        return torch.where(new != 0, old / new, torch.ones_like(old))
    if place.feeder is None:
        return None
    x, sizes, folded = (_fold(part, place) for part in (seen.rows, seen.sizes, weight))
    return _unfold(smoothing(x, sizes, folded, scheme.strengths, place.shared), place)


def _fold(rows: Tensor, place: LinearSite) -> Tensor:
    """Columns [Hkv, G, D] to [Hkv, D, G]: the inputs that share a row of v beside each other."""
    return rows.view(len(rows), -1, place.shared, place.head_dim).transpose(2, 3).flatten(1)


def _unfold(row: Tensor, place: LinearSite) -> Tensor:
    return row.view(-1, place.head_dim, place.shared).transpose(1, 2).flatten()


@torch.no_grad()
def apply_scales(model: Decoder, scheme: Int8Scheme, found: Found) -> Decoder:
    """Replace in place the layers that `scheme` quantizes, by scales `found` for just this model; returns it.

    Raises ValueError when the scales do not fit the model.
    """
    wanted = list(places(model, scheme))
    if {place.name for place in wanted} != set(found):
        raise ValueError("these scales were found for other layers than this scheme quantizes")
    for place in wanted:  # a layer comes after the one that feeds it, which is then quantized already
        _replace(model, place.name, _quantized(model.get_submodule(place.name), found[place.name]))
        given = found[place.name].smoothing
        if given is not None:
            _absorb(model, place, given.to(model.norm.weight.device))
    if not scheme.keeps("head", model.spec.layers):
        model.head_dtype = torch.float32  # scores rounded to fewer bits would tie
    return model


def _quantized(linear: nn.Module, scales: Scales) -> QuantizedLinear:
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    if scales.scale.shape != weight.shape[:1]:
        raise ValueError(f"scales for {len(scales.scale)} channels do not fit a layer of {len(weight)}")
    scale, values = scales.scale.to(weight.device), weight.float()
    if scales.smoothing is not None:
        values = values * scales.smoothing.to(weight.device)
    # Its own copy of the scales: what it feeds may have them divided.
    return QuantizedLinear(rounded(values, scale), scale.clone(), bias)


def _absorb(model: Decoder, place: LinearSite, divisor: Tensor) -> None:
    """Let what feeds the layer at `place` give inputs divided by `divisor` [inputs]."""
    if place.norm is not None:
        _divide(place.norm.weight, divisor)
        if isinstance(place.norm, LayerNorm):
            _divide(place.norm.bias, divisor)
        return
    assert place.feeder is not None
    feeder = model.get_submodule(place.feeder)
    assert isinstance(feeder, QuantizedLinear)
    rows = divisor.view(-1, place.shared, place.head_dim)[:, 0].flatten()
    _divide(feeder.scale[-len(rows) :], rows)
    if feeder.bias is not None:
        _divide(feeder.bias[-len(rows) :], rows)


def _divide(values: Tensor, divisor: Tensor) -> None:
    values.copy_(values.float() / divisor)


def _replace(model: Decoder, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
