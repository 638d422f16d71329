"""What tells a decoder that computes with other ranks from one that computes alone."""

from __future__ import annotations

from torch import nn


class RankModule(nn.Module):
    """A module whose forward exchanges with other ranks: kernels that read a model's weights cannot stand in for it."""


def computes_with_others(model: nn.Module) -> bool:
    return any(isinstance(module, RankModule) for module in model.modules())
