"""INT8 in plain torch: linear layers of 8-bit weights and activations, and attention over an 8-bit KV cache.

The truth that faster forms are tested against. Products are exact integers; scales, softmax and sums are float32.

Shapes: M rows, K inputs, N outputs, T new tokens in the step, Hq query heads, Hkv key-value heads, D head dimensions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from serving.batch.ragged import RaggedBatch
from serving.kernels import hadamard, reference

LARGEST = 127  # symmetric: -128 is not used
EXACT_INPUTS = (1 << 24) // (128 * 128)  # of int8 products that add up to what float32 holds exactly
_CUDA_ROWS = 32  # torch's integer product on CUDA wants more than 16 rows, and widths that are multiples of 8


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of x [..., W] = round(127 x / max|x|) for each row, and the float32 scales max|x| / 127 [...]."""
    x = x.float()
    return quantize_rows_to(x, x.abs().amax(dim=-1))


def quantize_rows_to(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of float32 parts of rows whose largest magnitudes [...] are given."""
    # A quotient, as in the compiled kernels: a number over a tensor would be its reciprocal times the number.
    inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST) / largest, 0.0)
    return (x * inverse[..., None]).round().to(torch.int8), largest / LARGEST


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """Exact a [M, K] · b [N, K]ᵀ of int8 matrices, as integers or as floating point numbers that hold them exactly."""
    rows, width = a.shape
    if a.device.type == "cpu" and not torch.cpu._is_vnni_supported():
        return _product_in_floats(a, b)
    if a.device.type == "cpu" and rows and width > 1:  # of width 1 torch 2.13 returns wrong products
        return torch._int_mm(a, b.t())
    if a.device.type == "cuda" and not b.shape[0] % 8 and not width % 8:
        padded = F.pad(a, (0, 0, 0, max(_CUDA_ROWS - rows, 0)))
        return torch._int_mm(padded, b.t())[:rows]
    return a.double() @ b.double().t()


def _product_in_floats(a: Tensor, b: Tensor) -> Tensor:
    """`integer_product` of as many inputs at a time as float32 adds up exactly, whatever the order; float64 [M, N].

    For CPUs without VNNI, where torch's own product of int8 is a plain loop: one thread of a Zen 3, a [M, 576] by
    b [3072, 576], M of 1, 8, 64 and 1,024: 0.9, 1.8, 5.2 and 64 ms in float32, 2.4, 10, 124 and 1,971 ms in torch's.
    """
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for first in range(0, a.shape[1], EXACT_INPUTS):
        part = slice(first, first + EXACT_INPUTS)
        total += a[:, part].float() @ b[:, part].float().t()
    return total


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rotation: int = 0) -> Tensor:
    """x [..., K] · (weight [N, K] int8 * scale [N])ᵀ + bias, each row of x quantized on its own; in x's dtype.

    With `rotation` weights are those of x · H, where H is orthogonal: so many neighbours are joined by a Hadamard
    transform before they are quantized.
    """
    rows = x.reshape(-1, x.shape[-1])
    values, row_scale = quantize_rows(hadamard.transformed(rows, rotation) if rotation else rows)
    if rotation:
        row_scale = row_scale / rotation**0.5
    out = quantized_linear(values, row_scale, weight, scale, bias)
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def quantized_linear(values: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of rows that are quantized already, int8 [M, K] and [M]; float32 [M, N]."""
    return scaled(integer_product(values, weight), row_scale, scale, bias)


def scaled(product: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """What an integer product [M, N] of rows with scales [M] stands for; float32."""
    out = product.float() * (scale * row_scale[:, None])
    return out if bias is None else out + bias.float()


def write_kv(
    k: Tensor, v: Tensor, k_plane: Tensor, v_plane: Tensor, k_scale: Tensor, v_scale: Tensor, slots: Tensor
) -> None:
    """Store k and v [T, Hkv, D] at `slots` [T], each head of each token with a scale of its own.

    Planes are int8 [num_blocks, block_size, Hkv, D], scales float32 [num_blocks, block_size, Hkv].
    """
    blocks, offsets = slots // k_plane.shape[1], slots % k_plane.shape[1]
    for new, plane, scales in ((k, k_plane, k_scale), (v, v_plane, v_scale)):
        plane[blocks, offsets], scales[blocks, offsets] = quantize_rows(new)


def gather(k_plane: Tensor, v_plane: Tensor, k_scale: Tensor, v_scale: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.gather` of what the planes stand for."""
    keys = k_plane[blocks].float() * k_scale[blocks][..., None]
    values = v_plane[blocks].float() * v_scale[blocks][..., None]
    return keys.flatten(0, 1), values.flatten(0, 1)


def paged_attention(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention` over what the planes stand for, which is worked out for the blocks in use."""
    used, tables = torch.unique(batch.block_tables, return_inverse=True)
    keys = k_plane[used].float() * k_scale[used][..., None]
    values = v_plane[used].float() * v_scale[used][..., None]
    part = replace(batch, block_tables=tables)
    return reference.paged_attention(q, keys, values, part, scale, window, sinks)
