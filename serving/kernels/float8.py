"""FP8 in plain torch: linear layers of e4m3 weights and activations, with a scale for each output and for each row.

On a CPU it is the reference: products in float32 of what the 8 bits stand for. On CUDA torch's own scaled product
computes the same, in the device's FP8 units.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
ALIGNMENT = 16  # what CUDA's scaled product wants inputs and outputs to be multiples of


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of x [..., K], each row by its largest magnitude, and the float32 scales max|x| / 448 [...]; 1 of zeros."""
    x = x.float()
    largest = x.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (x / scale[..., None]).clamp(-LARGEST, LARGEST).to(DTYPE), scale


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] → [..., N] in x's dtype: weight e4m3 [N, K], scale float32 [N]."""
    values, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    product = scaled_product(values, row_scale, weight, scale)
    out = product if bias is None else product + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], len(weight))


def scaled_product(values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(values · weightᵀ) * row_scale * scale, float32 [M, N], of e4m3 [M, K] and [N, K]; on CUDA of bfloat16's bits."""
    if values.is_cuda and len(values) and not any(size % ALIGNMENT for size in weight.shape):
        rows, columns = row_scale[:, None], scale[None, :]
        product: Tensor = torch._scaled_mm(values, weight.t(), rows, columns, out_dtype=torch.bfloat16)
        return product.float()
    return (values.float() @ weight.float().t()) * row_scale[:, None] * scale
