"""Norms over the last dimension, as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from serving import kernels


class Norm(nn.Module):
    """Over rows of `width`, which it multiplies by a gain: `offset` + its weight."""

    offset = 0.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))

    def gain(self) -> Tensor:
        """[width] float32."""
        return self.weight.float() + self.offset

    def weight_of(self, gain: Tensor) -> Tensor:
        """The weight that stands for a gain, in its type."""
        return (gain - self.offset).to(self.weight.dtype)


class RmsNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class OffsetRmsNorm(Norm):
    """The gain is 1 + the weight, in float32: Gemma (arXiv 2403.08295)."""

    offset = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.gain(), self.eps)


class LayerNorm(Norm):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)
