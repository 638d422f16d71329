"""What the compiled forms of a forward pass share: is a model of the Llama shape, and its tensors as kernels take them.

They compute decoders of RMS norms, gated MLPs (some also routed experts of them) and rope; the torch form computes any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from serving.forward.released import held
from serving.kernels.layer_weights import L, LayerWeights, LinearWeights, MlpWeights, MoeWeights
from serving.model.decoder import Attention, Layer
from serving.model.gated_mlp import GatedMlp
from serving.model.moe import MoeMlp
from serving.model.moe_spec import MoeSpec
from serving.model.norms import RmsNorm
from serving.model.quantized_linear import QuantizedLinear
from serving.model.rope import Rope
from serving.model.spec import ModelSpec


def unlike_llama(spec: ModelSpec) -> str | None:
    """Why a model is not of the Llama shape, or None if it is. Layers may have experts in place of their MLP."""
    if spec.mla is not None:
        return "the fused step has no latent attention"
    if spec.sinks:
        return "the fused step has no attention sinks"
    if spec.moe is not None and not _plainly_routed(spec.moe):
        return f"the fused step does not route experts as {spec.architecture} does"
    plain = spec.norm == "rms" and spec.mlp == "gated_silu" and not spec.post_norms and spec.embedding_scale == 1.0
    rotated = spec.rope is not None and spec.window_rope is None and not spec.learned_positions
    if plain and rotated and spec.score_scale is None:
        return None
    return f"{spec.architecture} is not of the Llama shape"


def _plainly_routed(moe: MoeSpec) -> bool:
    """True if these few fields say all of a mixture of experts: the kernels know no others."""
    known = ("experts", "top_k", "intermediate", "sparse", "normalized")
    return moe == MoeSpec(**{name: getattr(moe, name) for name in known})


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
) -> LayerWeights[L]:
    """The weights of a decoder's `layer`, each as the function for its kind makes it of the module."""
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
        mlp=_mlp_weights(layer.mlp, linear, gate_up),
        head_norms=head_norms,
        window=attention.window,
    )


def _mlp_weights(
    mlp: nn.Module, linear: Callable[[nn.Module], L], gate_up: Callable[[nn.Module], L]
) -> MlpWeights[L] | MoeWeights[L]:
    if isinstance(mlp, GatedMlp):
        return _gated(mlp, linear, gate_up)
    assert isinstance(mlp, MoeMlp)
    return MoeWeights(
        router=linear(mlp.router),
        experts=tuple(_gated(expert, linear, gate_up) for expert in mlp.experts),
        top_k=mlp.spec.top_k,
        normalized=mlp.spec.normalized,
    )


def _gated(mlp: nn.Module, linear: Callable[[nn.Module], L], gate_up: Callable[[nn.Module], L]) -> MlpWeights[L]:
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
