"""An expert as the compiled CPU kernels stream it: parameters alone, which are copied and moved as those of any module.

It computes nothing by itself: whoever has the kernels reads `weights`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from serving.kernels.cpu.structures import Kind
from serving.kernels.cpu.weights import PackedLinear
from serving.kernels.layer_weights import MlpWeights


class _HeldLinear(nn.Module):
    """The tensors of a PackedLinear as parameters of their names."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed, self.scale = _parameter(packed.packed), _parameter(packed.scale)
        self.sums, self.bias = _parameter(packed.sums), _parameter(packed.bias)
        self._shape = replace(packed, packed=torch.empty(0), scale=None, sums=None, bias=None)

    @property
    def weights(self) -> PackedLinear:
        assert self.packed is not None
        return replace(self._shape, packed=self.packed.detach(), scale=self.scale, sums=self.sums, bias=self.bias)


class PackedExpert(nn.Module):
    """A gated MLP. `wire` is what its rows are as they travel to it: the inputs its first layer multiplies."""

    def __init__(self, weights: MlpWeights[PackedLinear]) -> None:
        super().__init__()
        self.gate_up, self.down = _HeldLinear(weights.gate_up), _HeldLinear(weights.down)
        self.wire: torch.dtype = Kind(weights.gate_up.kind).dtype

    @property
    def weights(self) -> MlpWeights[PackedLinear]:
        """They lie where the parameters do now."""
        return MlpWeights(gate_up=self.gate_up.weights, down=self.down.weights)


def _parameter(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
