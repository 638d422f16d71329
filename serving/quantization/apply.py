"""Finds INT8 scales for a built decoder, and applies them: smoothing absorbed by what comes before, layers replaced.

It changes a built model from outside, and relies on how a decoder's layers feed each other. It reads no files.

What feeds a linear layer absorbs the smoothing of its inputs, so that the function stays the same: a norm divides its
weight (qkv, gate_up, up, an untied head), the rows of v in qkv theirs (o; shared by the query heads of a group), the
rows of up theirs (down, where the gate multiplies: a plain activation does not let a factor through).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from serving.model.decoder import Decoder, Layer, PlainMlp
from serving.model.gated_mlp import GatedMlp
from serving.model.mla import MlaAttention
from serving.model.moe import MoeMlp
from serving.model.norms import LayerNorm, Norm
from serving.model.quantized_linear import QuantizedLinear
from serving.model.spec import ModelSpec
from serving.quantization.calibrate import LayerInputs, activations
from serving.quantization.scheme import Int8Scheme, Scales
from serving.quantization.search import clipped_scales, rotated, rounded, smoothing


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSite:
    """A linear layer, and what can absorb the smoothing of its inputs: a norm, or the last rows of another linear."""

    name: str
    norm: Norm | None = None
    feeder: str | None = None  # a linear layer; its last rows, as many as there are inputs / shared, make the inputs
    shared: int = 1  # how many inputs one row of the feeder makes
    head_dim: int = 1  # inputs of one head, where they are shared
    rotation: int = 0  # inputs that are joined before they are quantized; 0: none


def linear_sites(model: Decoder, scheme: Int8Scheme) -> Iterator[LinearSite]:
    """The linear layers that `scheme` quantizes."""
    spec = model.spec
    wanted = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not scheme.keeps(name, spec.layers):
            rotation = scheme.rotation(name, spec.layers, module.in_features)
            if rotation is not None:
                wanted[name] = rotation
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        at = f"layers.{index}"
        found = (*_attention_sites(layer, f"{at}.attention", wanted, spec), *_mlp_sites(layer, f"{at}.mlp", wanted))
        yield from (replace(site, rotation=wanted[site.name]) for site in found if site.name in wanted)
    if "head" in wanted:
        yield LinearSite(name="head", norm=model.norm, rotation=wanted["head"])


def _attention_sites(layer: Layer, at: str, wanted: Collection[str], spec: ModelSpec) -> Iterator[LinearSite]:
    """Of a layer's attention, named `at`. MLA's values are made by a layer that stays wide: it absorbs nothing."""
    if isinstance(layer.attention, MlaAttention):
        yield LinearSite(name=f"{at}.qkv_a", norm=layer.attention_norm)
        yield LinearSite(name=f"{at}.q_b", norm=layer.attention.q_a_norm)
        yield LinearSite(name=f"{at}.o")
        return
    qkv, group = f"{at}.qkv", spec.heads // spec.kv_heads
    yield LinearSite(name=qkv, norm=layer.attention_norm)
    yield LinearSite(name=f"{at}.o", feeder=qkv if qkv in wanted else None, shared=group, head_dim=spec.head_dim)


def _mlp_sites(layer: Layer, at: str, wanted: Collection[str]) -> Iterator[LinearSite]:
    """Of a layer's MLP, named `at`. A norm before a router and many experts has no smoothing that suits them all."""
    if isinstance(layer.mlp, PlainMlp):
        yield LinearSite(name=f"{at}.up", norm=layer.mlp_norm)
        yield LinearSite(name=f"{at}.down")
        return
    if isinstance(layer.mlp, GatedMlp):
        gated = [at]
    else:
        shared = [] if layer.mlp.shared is None else [f"{at}.shared"]
        gated = [*(f"{at}.experts.{i}" for i in range(len(layer.mlp.experts))), *shared]
    clamped = isinstance(layer.mlp, MoeMlp) and layer.mlp.spec.product is not None  # lets no factor through
    for one in gated:
        up = f"{one}.gate_up"
        yield LinearSite(name=up, norm=layer.mlp_norm if one == at else None)
        yield LinearSite(name=f"{one}.down", feeder=up if up in wanted and not clamped else None)


@torch.no_grad()
def find_scales(model: Decoder, scheme: Int8Scheme, calibration: Sequence[Sequence[int]] | None) -> dict[str, Scales]:
    """The scales of every layer that `scheme` quantizes, found on the `calibration` token sequences.

    Without calibration nothing is smoothed, and clipping considers the weights alone. The model is left as it is.
    """
    wanted = list(linear_sites(model, scheme))
    seen = {}
    if calibration:
        seen = activations(model, calibration, [site.name for site in wanted], scheme.rows)
    found = {}
    for site in wanted:
        linear = model.get_submodule(site.name)
        assert isinstance(linear, nn.Linear)
        weight = linear.weight.float()
        if site.name not in seen:
            weight = rotated(weight, site.rotation)
            found[site.name] = Scales(smoothing=None, scale=clipped_scales(weight, scheme.clips).cpu())
            continue
        given = seen.pop(site.name)
        x, chosen = given.rows, _smoothing(site, given, weight, scheme)
        smooth_x, smooth_weight = (x, weight) if chosen is None else (x / chosen, weight * chosen)
        smooth_x, smooth_weight = rotated(smooth_x, site.rotation), rotated(smooth_weight, site.rotation)
        token_size = (x @ weight.t()).norm(dim=-1, keepdim=True).clamp_min(1e-12)
        scale = clipped_scales(smooth_weight, scheme.clips, smooth_x / token_size)
        found[site.name] = Scales(smoothing=None if chosen is None else chosen.cpu(), scale=scale.cpu())
    return found


def _smoothing(site: LinearSite, seen: LayerInputs, weight: Tensor, scheme: Int8Scheme) -> Tensor | None:
    """The best smoothing that what feeds this layer can absorb; None where nothing can."""
    if site.norm is not None:
        best = smoothing(seen.rows, seen.sizes, weight, scheme.strengths, rotation=site.rotation)
        # What is stored of the divided norm is rounded: the weight is multiplied by what the norm was truly divided by.
        old = site.norm.gain()
        new = site.norm.weight_of(old / best).float() + site.norm.offset
        return torch.where(new != 0, old / new, torch.ones_like(old))
    if site.feeder is None:
        return None
    assert site.shared == 1 or not site.rotation, "folded columns have other neighbours"
    x, sizes, folded = (_fold(part, site) for part in (seen.rows, seen.sizes, weight))
    return _unfold(smoothing(x, sizes, folded, scheme.strengths, site.shared, site.rotation), site)


def _fold(rows: Tensor, site: LinearSite) -> Tensor:
    """Columns [Hkv, G, D] to [Hkv, D, G]: the inputs that share a row of v beside each other."""
    return rows.view(len(rows), -1, site.shared, site.head_dim).transpose(2, 3).flatten(1)


def _unfold(row: Tensor, site: LinearSite) -> Tensor:
    return row.view(-1, site.head_dim, site.shared).transpose(1, 2).flatten()


@torch.no_grad()
def apply_scales(
    model: Decoder,
    scheme: Int8Scheme,
    found: Mapping[str, Scales],
    ready: Callable[[str], None] = lambda name: None,
) -> Decoder:
    """Replace in place the layers that `scheme` quantizes, by scales `found` for just this model; returns it.

    `ready(name)` is called before a layer's weights are read: they need not be there earlier. Raises ValueError when
    the scales do not fit the model.
    """
    wanted = list(linear_sites(model, scheme))
    if {site.name for site in wanted} != set(found):
        raise ValueError("these scales were found for other layers than this scheme quantizes")
    for site in wanted:  # a layer comes after the one that feeds it, which is then quantized already
        ready(site.name)
        model.set_submodule(site.name, _quantized(model.get_submodule(site.name), found[site.name], site.rotation))
        given = found[site.name].smoothing
        if given is not None:
            _absorb(model, site, given.to(model.norm.weight.device))
    if not scheme.keeps("head", model.spec.layers):
        model.head_dtype = torch.float32  # scores rounded to fewer bits would tie
    return model


def _quantized(linear: nn.Module, scales: Scales, rotation: int) -> QuantizedLinear:
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    if scales.scale.shape != weight.shape[:1]:
        raise ValueError(f"scales for {len(scales.scale)} channels do not fit a layer of {len(weight)}")
    scale, values = scales.scale.to(weight.device), weight.float()
    if scales.smoothing is not None:
        values = values * scales.smoothing.to(weight.device)
    # Its own copy of the scales: what it feeds may have them divided.
    return QuantizedLinear(rounded(rotated(values, rotation), scale), scale.clone(), bias, rotation)


def _absorb(model: Decoder, site: LinearSite, divisor: Tensor) -> None:
    """Let what feeds the layer at `site` give inputs divided by `divisor` [inputs]."""
    if site.norm is not None:
        site.norm.weight.copy_(site.norm.weight_of(site.norm.gain() / divisor))
        if isinstance(site.norm, LayerNorm):
            _divide(site.norm.bias, divisor)
        return
    assert site.feeder is not None
    feeder = model.get_submodule(site.feeder)
    assert isinstance(feeder, QuantizedLinear)
    rows = divisor.view(-1, site.shared, site.head_dim)[:, 0].flatten()
    _divide(feeder.scale[-len(rows) :], rows)
    if feeder.bias is not None:
        _divide(feeder.bias[-len(rows) :], rows)


def _divide(values: Tensor, divisor: Tensor) -> None:
    values.copy_(values.float() / divisor)
