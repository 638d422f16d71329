"""What a mixture of experts looks like, as data. Imports nothing heavy: routers and planners read it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedSwiglu:
    """(up + 1) gate sigmoid(alpha gate), of a gate that is at most `limit` and an up within ± it (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """Routed experts in place of the MLPs of some layers: each a gated MLP, of which a token takes `top_k`."""

    experts: int
    top_k: int
    intermediate: int  # width of one expert
    sparse: tuple[bool, ...]  # for each layer whether it has experts; the others have an MLP
    normalized: bool = True  # the weights of a token's experts sum to 1, before `scaling`
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scaling: float = 1.0  # factor on the weights
    groups: int = 1  # experts fall into so many groups of neighbours
    top_groups: int = 1  # of which a token takes its experts from so many
    group_best: int = 1  # a group's score is the sum of so many of its best experts'
    biased: bool = False  # a learned bias for each expert joins its score in the choice, not in the weight
    router_float32: bool = False  # logits are computed in float32, whatever the model's type
    bias: bool = False  # the router and the experts' layers have biases
    product: ClampedSwiglu | None = None  # what an expert makes of its gate and up; None: silu(gate) up
    shared_intermediate: int = 0  # width of the MLP that every token goes through beside its experts; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.experts:
            raise ValueError(f"a token cannot take {self.top_k} of {self.experts} experts")
        if not 0 < self.top_groups <= self.groups or self.experts % self.groups:
            raise ValueError(f"{self.experts} experts in {self.groups} groups: {self.top_groups} cannot be chosen")
        if self.top_k > self.top_groups * (self.experts // self.groups):
            raise ValueError(f"{self.top_groups} of {self.groups} groups do not hold {self.top_k} experts")
        if self.groups > 1 and self.group_best > self.experts // self.groups:
            raise ValueError(f"groups of {self.experts // self.groups} experts have no {self.group_best} best ones")
