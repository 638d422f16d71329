"""The weights of one layer of the Llama shape, as the compiled decoders take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

L = TypeVar("L")  # a linear layer, as the kernels read it


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWeights:
    """weight [N, K] of a float type, or int8 with a float32 scale [N] for each output; bias [N]."""

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights(Generic[L]):
    """Outputs of `qkv` are the heads of q, then of k, then of v; those of `gate_up` gate's and up's."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    qkv: L
    o: L
    gate_up: L
    down: L
    head_norms: tuple[Tensor, Tensor] | None = None  # [head_dim] for q and for k
    window: int | None = None  # tokens a query sees, its own included; None: all
