"""The weights of a built decoder of the Llama shape as the compiled CPU kernels stream them.

What they compute with them is in serving.kernels.cpu. It may not know KV planes or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from serving.forward.llama_shape import layer_weights, linear_weights, norm_weight, rotary_tables
from serving.forward.released import release
from serving.kernels import cpu
from serving.kernels.layer_weights import LayerWeights, MlpWeights
from serving.model.decoder import Decoder
from serving.model.moe import MoeMlp
from serving.model.quantized_linear import QuantizedLinear

PackedLayer = LayerWeights[cpu.PackedLinear]
MakeDecoder = Callable[..., cpu.CpuDecoder]
"""Of `layers` and `kv`."""


def decoder_of(
    model: Decoder, kernels: cpu.Kernels, max_position: int, *, releases: bool, has_head: bool = True
) -> MakeDecoder:
    """All of `model` but its layers, packed. With `releases` linear layers give up their weights as they are.

    Before its layers are packed: what the head is screened by depends on them.
    """
    spec = model.spec
    cos, sin = rotary_tables(spec.rope, max_position)
    return partial(
        cpu.CpuDecoder,
        kernels,
        cpu.DecoderShape(
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate,
            vocab=spec.vocab_size,
            eps=spec.norm_eps,
        ),
        embedding=model.embed.weight.detach().contiguous(),
        final_norm=float_norm(model.norm),
        screen=_screen_of(model, kernels) if has_head else None,
        head=_pack_head(model, kernels, releases) if has_head else kernels.pack(model.embed.weight.detach()[:0]),
        cos=cos,
        sin=sin,
    )


def packed_layers(
    model: Decoder,
    kernels: cpu.Kernels,
    *,
    releases: bool,
    experts: Callable[[MoeMlp], tuple[MlpWeights[cpu.PackedLinear], ...]] | None = None,
) -> list[PackedLayer]:
    """Its layers; `experts`, where given, are those of a mixture (llama_shape.layer_weights)."""
    pack = partial(pack_linear, kernels, releases)
    gate_up = partial(pack, interleaved=True)
    return [layer_weights(layer, float_norm, pack, gate_up, experts) for layer in model.layers]


def float_norm(norm: nn.Module) -> Tensor:
    return norm_weight(norm).float().contiguous()


def _pack_head(model: Decoder, kernels: cpu.Kernels, releases: bool) -> cpu.PackedLinear:
    """The head in the embedding's type: from its numbers where the two share them, a head that was widened has no more.

    A copy of the largest matrix less, on the way.
    """
    if not model.spec.tied_embeddings or isinstance(model.head, QuantizedLinear):
        return pack_linear(kernels, releases, model.head, dtype=model.embed.weight.dtype)
    packed = kernels.pack(model.embed.weight.detach())
    if releases:
        release(model.head)
    return packed


def _screen_of(model: Decoder, kernels: cpu.Kernels) -> cpu.HeadScreen | None:
    """What the best tokens are found by where the layers are INT8 and the head is not: half of its bytes once more.

    Those who compress the layers want speed for memory's sake, and of what is left the head is the largest part.
    """
    head = model.head
    narrow = any(isinstance(module, QuantizedLinear) for module in model.modules())
    if not narrow or isinstance(head, QuantizedLinear) or getattr(head, "bias", None) is not None:
        return None
    if model.embed.weight.dtype is not torch.bfloat16:
        return None
    weight = (model.embed if model.spec.tied_embeddings else head).weight.detach()
    return kernels.screen(weight.to(torch.bfloat16))  # which it is packed as: one that was widened has no more


def pack_linear(
    kernels: cpu.Kernels,
    releases: bool,
    linear: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    interleaved: bool = False,
) -> cpu.PackedLinear:
    """A layer's weights as the kernels stream them: INT8 with scales, or held as `dtype` (its own by default)."""
    w = linear_weights(linear)
    weight, scale, bias = w.weight, w.scale, w.bias
    if scale is None:
        weight = weight.to(dtype or weight.dtype)
    if interleaved:
        weight = cpu.interleave(*weight.chunk(2))
        bias = None if bias is None else cpu.interleave(*bias.chunk(2))
        scale = None if scale is None else cpu.interleave(*scale.chunk(2))
    packed = kernels.pack(weight, scale=scale, bias=bias, rotation=w.rotation)
    if releases:
        release(linear)
    return packed
