"""Operations that look at one row at a time: RMSNorm, SiLU·mul, residual addition, and int8 quantization of the result.

Memory-bound: each fused form reads its inputs once and writes its outputs once. Numbers are rounded to the tensors'
type exactly where the unfused reference rounds them, so fused and unfused forms differ by float32 rounding alone.

Quantization is symmetric: scale = max|row| / 127 and value = round(x / scale), a row of zeros getting scale 0. A row
with an infinity or a NaN gets the scale NaN, so what follows shows it and does not hide it in an integer.

Shapes: R rows (all leading dimensions), W their width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import (
    FLOATS,
    kernel,
    kernel_of_any,
    power_of_two,
    require,
    require_device,
    require_float,
)

TILE = 2048  # elements of one program's tile, unless a single row is longer
WIDEST = 65536  # a row has to fit into the registers of one program

ROUNDER = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it leaves no fraction bits, so the sum is rounded half to even
SMALLEST = tl.constexpr(1e-30)  # rows below this are zeros: 127 / max would overflow float32


class Quantized(NamedTuple):
    values: Tensor  # [..., W] int8
    scales: Tensor  # [...] float32: x ≈ values * scales[..., None]


def supported(width: int, dtype: torch.dtype) -> bool:
    """True if rows of this width and type can be worked on."""
    return 0 < width <= WIDEST and dtype in FLOATS


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, quantized: bool = False
) -> tuple[Tensor | Quantized, Tensor]:
    """(rms_norm(s), s) with s = x + residual, or x itself without one.

    All are [..., W] of one dtype (float32, bf16 or fp16), the weight [W]; norms are computed in float32. With
    `quantized` it is `quantize` of the norm, which is not written itself. Without residual x may have two strides, as a
    slice of heads has. ValueError for other layouts, types or shapes.
    """
    width = x.shape[-1]
    _check(x, width)
    require_device(x, weight)
    require(weight.shape == (width,) and weight.is_contiguous(), f"weight must be [{width}], not {list(weight.shape)}")
    summed = x
    if residual is not None:
        require(residual.shape == x.shape and residual.dtype == x.dtype, "x and residual must be alike")
        require(x.is_contiguous() and residual.is_contiguous(), "x and residual must be contiguous")
        require_device(x, residual)
        summed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out: Tensor | Quantized = _quantized(x, width) if quantized else x.new_empty(x.shape)
    if x.numel():
        rows, grid, tile = _tiles(x, width)
        _norm_rows[grid](
            x,
            x if residual is None else residual,
            weight,
            summed,
            *_targets(x, out),
            rows,
            width,
            *_strides(x),
            eps,
            ADD=residual is not None,
            QUANTIZE=quantized,
            **tile,
        )
    return out, summed


def silu_mul(gate_up: Tensor, *, quantized: bool = False) -> Tensor | Quantized:
    """silu(gate) * up for gate_up [..., 2W], gate first: [..., W] in its dtype (float32, bf16 or fp16).

    With `quantized` it is `quantize` of the product, which is not written itself.
    """
    require(gate_up.shape[-1] % 2 == 0, "gate_up must have an even width")
    width = gate_up.shape[-1] // 2
    _check(gate_up, width)
    out: Tensor | Quantized = _quantized(gate_up, width) if quantized else gate_up.new_empty(*gate_up.shape[:-1], width)
    if gate_up.numel():
        rows, grid, tile = _tiles(gate_up, width)
        targets = _targets(gate_up, out)
        _silu_rows[grid](gate_up, *targets, rows, width, *_strides(gate_up), QUANTIZE=quantized, **tile)
    return out


def quantize(x: Tensor) -> Quantized:
    """Symmetric int8 of each row of x [..., W] (float32, bf16 or fp16)."""
    width = x.shape[-1]
    _check(x, width)
    out = _quantized(x, width)
    if x.numel():
        rows, grid, tile = _tiles(x, width)
        _quantize_rows[grid](x, *out, rows, width, *_strides(x), **tile)
    return out


def _targets(unused: Tensor, out: Tensor | Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels' output, int8 values and scales; `unused` stands for those that are not written."""
    return (unused, *out) if isinstance(out, Quantized) else (out, unused, unused)


def _check(x: Tensor, width: int) -> None:
    require_device(x)
    require_float("x", x)
    require(supported(width, x.dtype), f"rows must be 1 to {WIDEST} wide, not {width}")


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(inner, outer stride, inner stride): row r lies at (r // inner) * outer stride + (r % inner) * inner stride."""
    require(x.stride(-1) == 1, "the last dimension must have stride 1")
    if x.is_contiguous():
        return 1, x.shape[-1], 0
    require(x.dim() in (2, 3), "tensors of more than three dimensions must be contiguous")
    return (1, x.stride(0), 0) if x.dim() == 2 else (x.shape[1], x.stride(0), x.stride(1))


def _tiles(x: Tensor, width: int) -> tuple[int, tuple[int], dict[str, int]]:
    """The number of rows of x, the grid of programs over them, and the tile of each program."""
    rows, block = x.numel() // x.shape[-1], power_of_two(width)
    tall = max(1, TILE // block)
    return rows, (triton.cdiv(rows, tall),), {"ROWS": tall, "BLOCK": block, "num_warps": warps_of(block)}


def warps_of(block: int) -> int:
    """Of a program whose rows are so long."""
    return 4 if block <= TILE else 8 if block <= 8192 else 16


def _quantized(x: Tensor, width: int) -> Quantized:
    """Room for rows of this width in place of x's."""
    values = torch.empty((*x.shape[:-1], width), dtype=torch.int8, device=x.device)
    return Quantized(values, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))


@kernel
def quantized_tile(x):  # type: ignore[no-untyped-def]
    """x [ROWS, BLOCK] float32 → (int8 values [ROWS, BLOCK], scales [ROWS]); masked elements must be 0."""
    top = tl.max(tl.abs(x), axis=1)
    inverse = tl.where(top > SMALLEST, tl.div_rn(127.0, tl.maximum(top, SMALLEST)), 0.0)
    rounded = (x * inverse[:, None] + ROUNDER) - ROUNDER
    wrong = tl.sum(x * 0.0, axis=1)  # 0, or NaN if any element is not finite
    scale = tl.where(top > SMALLEST, tl.div_rn(top, 127.0), 0.0) + wrong
    return rounded.to(tl.int8), scale


@kernel
def silu_product(gate, up, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up of float32, rounded to KIND as often as the two operations do."""
    activated = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(KIND).to(tl.float32)
    return (activated * up).to(KIND)


@kernel
def _row_tile(rows, width, inner, outer_stride, inner_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row numbers, where each starts in the input, columns, mask) of this program's tile."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    return row, start, column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@kernel
def _store(y, row, rows, at, mask, out_ptr, values_ptr, scales_ptr, QUANTIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write y [ROWS, BLOCK] as it is, or as int8 values and their scales."""
    if QUANTIZE:
        values, scales = quantized_tile(y.to(tl.float32))
        tl.store(values_ptr + at, values, mask=mask)
        tl.store(scales_ptr + row, scales, mask=row < rows)
    else:
        tl.store(out_ptr + at, y, mask=mask)


@kernel_of_any("rows")
def _norm_rows(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    summed_ptr,
    out_ptr,
    values_ptr,
    scales_ptr,
    rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    eps,
    ADD: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, column, mask = _row_tile(rows, width, inner, outer_stride, inner_stride, ROWS, BLOCK)
    at = row[:, None] * width + column
    x = tl.load(x_ptr + start[:, None] + column, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(summed_ptr + at, x, mask=mask)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=1) / width
    normed = (x * tl.rsqrt(mean + eps)[:, None] * weight).to(x_ptr.dtype.element_ty)
    _store(normed, row, rows, at, mask, out_ptr, values_ptr, scales_ptr, QUANTIZE)


@kernel_of_any("rows")
def _silu_rows(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    out_ptr,
    values_ptr,
    scales_ptr,
    rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, column, mask = _row_tile(rows, width, inner, outer_stride, inner_stride, ROWS, BLOCK)
    at = row[:, None] * width + column
    kind: tl.constexpr = gate_up_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + start[:, None] + width + column, mask=mask, other=0.0).to(tl.float32)
    _store(silu_product(gate, up, kind), row, rows, at, mask, out_ptr, values_ptr, scales_ptr, QUANTIZE)


@kernel_of_any("rows")
def _quantize_rows(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    scales_ptr,
    rows,
    width,
    inner,
    outer_stride,
    inner_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start, column, mask = _row_tile(rows, width, inner, outer_stride, inner_stride, ROWS, BLOCK)
    x = tl.load(x_ptr + start[:, None] + column, mask=mask, other=0.0)
    _store(x, row, rows, row[:, None] * width + column, mask, values_ptr, values_ptr, scales_ptr, True)
