"""A linear layer of 8-bit weights and activations, in place of `nn.Linear` in a built model.

It computes by the reference kernel; faster kernels read `weight`, `scale` and `bias` and compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from serving.kernels import float8, int8


class QuantizedLinear(nn.Module):
    """x [..., in] → [..., out] in x's dtype: (Q(x) · weightᵀ) * scale * row scale + bias.

    `weight` is int8 or FP8 [out, in], `scale` float32 [out], one for each output; rows of x are quantized to the same
    as they come, each by its largest magnitude. With `rotation` Hadamard transforms join so many neighbouring inputs
    before that, and int8 weights are those of what comes out (`int8.linear`).
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, rotation: int = 0) -> None:
        super().__init__()
        self.rotation = rotation
        assert weight.dtype in (torch.int8, float8.DTYPE), weight.dtype
        assert scale.shape == weight.shape[:1], scale.shape
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.float(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.float8:
            return float8.linear(x, self.weight, self.scale, self.bias)
        return int8.linear(x, self.weight, self.scale, self.bias, self.rotation)

    @property
    def float8(self) -> bool:
        return self.weight.dtype == float8.DTYPE

    def of_quantized(self, values: Tensor, row_scale: Tensor) -> Tensor:
        """`forward`, float32 [M, out], of rows that `int8.quantize_rows` has made int8 [M, in] and [M]."""
        assert not self.rotation, "these rows were quantized without being transformed"
        return int8.quantized_linear(values, row_scale, self.weight, self.scale, self.bias)


def hold_int8(
    model: nn.Module,
    names: Sequence[str],
    dtype: torch.dtype = torch.int8,
    rotations: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Replace the linear modules `names` of a model built on meta, so that INT8 tensors can be loaded into them.

    Or tensors of another 8-bit type. `rotations` are those of layers that have one.
    """
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        outputs, inputs = linear.weight.shape
        weight = torch.empty(outputs, inputs, dtype=dtype, device="meta")
        scale = torch.empty(outputs, device="meta")
        model.set_submodule(name, QuantizedLinear(weight, scale, linear.bias, rotations.get(name, 0)))


def own_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The parameters of quantized layers that keep a type of their own, whatever the model's is."""
    own: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            own |= {f"{name}.weight": module.weight.dtype, f"{name}.scale": torch.float32}
    return own


def rotated_linear(model: nn.Module) -> str | None:
    """The first linear layer whose inputs are transformed before they are quantized; None: there is none."""
    modules = model.named_modules()
    return next((name for name, module in modules if isinstance(module, QuantizedLinear) and module.rotation), None)


def float8_linears(model: nn.Module) -> str | None:
    """The first linear layer of 8-bit floats; None: there is none."""
    modules = model.named_modules()
    return next((name for name, module in modules if isinstance(module, QuantizedLinear) and module.float8), None)
