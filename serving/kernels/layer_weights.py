"""The weights of one layer of the Llama shape, as the compiled decoders take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

L = TypeVar("L")  # a linear layer, as the kernels read it


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWeights:
    """weight [N, K] of a float type, or int8 with a float32 scale [N] for each output; bias [N].

    With `rotation` they are int8 weights of inputs that were transformed, so many at a time (`int8.linear`).
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    rotation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpWeights(Generic[L]):
    """A gated MLP. Outputs of `gate_up` are gate's and up's."""

    gate_up: L
    down: L


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpread:
    """Where the experts of a layer are that ranks share. Shapes: E experts, C copies of one at most."""

    exchange: int  # the address of a compiled exchange (kernels/cpu/exchange.h), which outlives the steps
    copies: Tensor  # [E] int32: how many slots a row may go to
    physical: Tensor  # [E, C] int32: those, rank * slots + slot
    taken: Tensor | None = None  # [E] int64: the rows that chose an expert are added


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeWeights(Generic[L]):
    """Experts in place of an MLP, as serving.model.moe.route chooses among them: the `top_k` best of a token."""

    router: L
    experts: tuple[MlpWeights[L], ...]
    top_k: int
    normalized: bool  # the weights of a token's experts sum to 1
    spread: ExpertSpread | None = None  # None: `experts` are all; else those behind this rank's slots


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights(Generic[L]):
    """Outputs of `qkv` are the heads of q, then of k, then of v."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    qkv: L
    o: L
    mlp: MlpWeights[L] | MoeWeights[L]
    head_norms: tuple[Tensor, Tensor] | None = None  # [head_dim] for q and for k
    window: int | None = None  # tokens a query sees, its own included; None: all
