"""What the compiled forms of a forward pass share: the tensors of a model of the Llama shape, as kernels take them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from serving.forward.released import held
from serving.kernels.layer_weights import L, LayerWeights, LinearWeights, MlpWeights, MoeWeights
from serving.model.decoder import Attention, Layer
from serving.model.gated_mlp import GatedMlp
from serving.model.moe import MoeMlp
from serving.model.norms import RmsNorm
from serving.model.quantized_linear import QuantizedLinear
from serving.model.rope import Rope


def rotary_tables(rope: Rope | None, positions: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin [positions, pairs] float32 of each position's angle."""
    assert rope is not None
    turns = torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * turns
    return (angles.cos() * rope.magnitude).contiguous(), (angles.sin() * rope.magnitude).contiguous()


def layer_weights(
    layer: nn.Module,
    norm: Callable[[nn.Module], Tensor],
    linear: Callable[[nn.Module], L],
    gate_up: Callable[[nn.Module], L],
    experts: Callable[[MoeMlp], tuple[MlpWeights[L], ...]] | None = None,
) -> LayerWeights[L]:
    """The weights of a decoder's `layer`, each as the function for its kind makes it of the module.

    `experts`, where given, are those of a mixture, whose modules are not asked then.
    """
    assert isinstance(layer, Layer) and isinstance(layer.attention, Attention)
    attention = layer.attention
    head_norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        head_norms = (norm(attention.q_norm), norm(attention.k_norm))
    return LayerWeights(
        attention_norm=norm(layer.attention_norm),
        mlp_norm=norm(layer.mlp_norm),
        qkv=linear(attention.qkv),
        o=linear(attention.o),
        mlp=_mlp_weights(layer.mlp, linear, gate_up, experts),
        head_norms=head_norms,
        window=attention.window,
    )


def _mlp_weights(
    mlp: nn.Module,
    linear: Callable[[nn.Module], L],
    gate_up: Callable[[nn.Module], L],
    experts: Callable[[MoeMlp], tuple[MlpWeights[L], ...]] | None,
) -> MlpWeights[L] | MoeWeights[L]:
    if isinstance(mlp, GatedMlp):
        return gated_weights(mlp, linear, gate_up)
    assert isinstance(mlp, MoeMlp)
    return MoeWeights(
        router=linear(mlp.router),
        experts=experts(mlp) if experts else tuple(gated_weights(one, linear, gate_up) for one in mlp.experts),
        top_k=mlp.spec.top_k,
        normalized=mlp.spec.normalized,
    )


def gated_weights(mlp: nn.Module, linear: Callable[[nn.Module], L], gate_up: Callable[[nn.Module], L]) -> MlpWeights[L]:
    assert isinstance(mlp, GatedMlp)
    return MlpWeights(gate_up=gate_up(mlp.gate_up), down=linear(mlp.down))


def norm_weight(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RmsNorm)
    return norm.weight.detach()


def linear_weights(linear: nn.Module) -> LinearWeights:
    """Raises RuntimeError where the layer's weights were given up."""
    assert isinstance(linear, nn.Linear | QuantizedLinear)
    return LinearWeights(
        weight=held(linear.weight.detach()),
        scale=linear.scale.detach() if isinstance(linear, QuantizedLinear) else None,
        bias=None if linear.bias is None else linear.bias.detach(),
        rotation=linear.rotation if isinstance(linear, QuantizedLinear) else 0,
    )
