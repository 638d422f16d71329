"""INT8 matrix products: int8 activations with a scale per token, int8 weights with a scale per output channel.

Two kernels: one for many rows, bound by arithmetic, fed by the tensor memory accelerator; one for up to 64 rows, bound
by reading the weights, which splits the inputs over programs where the outputs alone would not fill the device. Sums
are exact integers, so the result does not depend on the kernel, its tiles or the split: it is the same to the bit
whatever else is in the batch.

Shapes: T rows of activations, K inputs, N outputs, S splits of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from serving.kernels.gpu.launch import (
    FLOATS,
    INTERPRETED,
    kernel,
    kernel_of_any,
    multiprocessors,
    power_of_two,
    require,
    require_device,
)

FEW_ROWS = 64  # up to here reading the weights takes longer than multiplying
ALIGNMENT = 16  # bytes: what the memory accelerator needs a row to be a multiple of
SPLIT_INPUTS = 512  # a split of fewer inputs costs more in partial sums than it wins
LARGEST_SUM = 2**31 // 128**2 - 1  # inputs whose products cannot overflow an int32


def supported(inputs: int, outputs: int) -> bool:
    """True if a layer of these sizes can be computed."""
    return 0 < inputs <= LARGEST_SUM and inputs % ALIGNMENT == 0 and outputs > 0


def int8_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(values @ weightᵀ) * scales[:, None] * weight_scales + bias, [T, N] in `out_dtype` (float32, bf16 or fp16).

    values [T, K] and weight [N, K] int8, contiguous, -127 to 127; scales [T] and weight_scales [N] float32; bias [N],
    any float. The sums are exact, the epilogue is float32. ValueError for other types, layouts and sizes.
    """
    _check(values, scales, weight, weight_scales, bias, out_dtype)
    out = torch.empty((len(values), len(weight)), dtype=out_dtype, device=values.device)
    if not len(values):
        return out
    if len(values) <= FEW_ROWS:
        _few_rows(values, scales, weight, weight_scales, bias, out)
    else:
        _many_rows(values, scales, weight, weight_scales, bias, out)
    return out


def tune(weight: Tensor, weight_scales: Tensor, bias: Tensor | None, most_rows: int, out_dtype: torch.dtype) -> None:
    """Choose tiles for every number of rows up to `most_rows`, so that no request waits for it and graphs can capture.

    The choice is kept per (K, N): one layer of each shape is enough.
    """
    for rows in (bucket for bucket in (16, 32, 64, 256, 1024, 4096) if bucket == 16 or bucket // 2 < most_rows):
        values = torch.randint(-127, 128, (rows, weight.shape[1]), dtype=torch.int8, device=weight.device)
        scales = torch.ones(rows, dtype=torch.float32, device=weight.device)
        int8_linear(values, scales, weight, weight_scales, bias, out_dtype)


def _check(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> None:
    require_device(values, scales, weight, weight_scales, *([] if bias is None else [bias]))
    require(values.dtype == weight.dtype == torch.int8, "values and weight must be int8")
    require(values.dim() == weight.dim() == 2 and values.shape[1] == weight.shape[1], "values [T, K] and weight [N, K]")
    (rows, inputs), outputs = values.shape, len(weight)
    require(supported(inputs, outputs), f"{inputs} inputs: not a multiple of {ALIGNMENT} up to {LARGEST_SUM}")
    require(values.is_contiguous() and weight.is_contiguous(), "values and weight must be contiguous")
    require(scales.dtype == weight_scales.dtype == torch.float32, "scales must be float32")
    require(scales.shape == (rows,) and scales.is_contiguous(), f"scales must be [{rows}]")
    require(weight_scales.shape == (outputs,) and weight_scales.is_contiguous(), f"weight_scales must be [{outputs}]")
    require(bias is None or (bias.shape == (outputs,) and bias.is_contiguous()), f"bias must be [{outputs}]")
    require(out_dtype in FLOATS, f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")


def _few_rows(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    (rows, inputs), outputs = values.shape, len(weight)
    splits = input_splits(inputs, outputs, multiprocessors(values.device))
    share = triton.cdiv(triton.cdiv(inputs, splits), 128) * 128
    splits = triton.cdiv(inputs, share)
    shape = (splits, rows, outputs)
    sums = torch.empty(shape, dtype=torch.int32, device=out.device) if splits > 1 else out
    added = weight_scales if bias is None else bias
    _few_rows_kernel[lambda chosen: (triton.cdiv(outputs, chosen["BLOCK_N"]), splits)](
        values,
        weight,
        scales,
        weight_scales,
        added,
        out,
        sums,
        rows,
        outputs,
        inputs,
        share,
        BIAS=bias is not None,
        SPLIT=splits > 1,
        BLOCK_M=max(16, power_of_two(rows)),
    )
    if splits > 1:
        _add_splits_kernel[(rows, triton.cdiv(outputs, 256))](
            sums, scales, weight_scales, added, out, rows, outputs, splits, BIAS=bias is not None, BLOCK_N=256
        )


def input_splits(inputs: int, outputs: int, programs: int) -> int:
    """Over how many programs the inputs are split: 1 when 16 outputs a program give every multiprocessor work."""
    if outputs >= 16 * programs:
        return 1
    tiles = -(-outputs // 32)
    return max(1, min(-(-2 * programs // tiles), inputs // SPLIT_INPUTS))


def _many_rows(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    (rows, inputs), outputs = values.shape, len(weight)

    def grid(chosen: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(rows, chosen["BLOCK_M"]) * triton.cdiv(outputs, chosen["BLOCK_N"]),)

    _many_rows_kernel[grid](
        TensorDescriptor.from_tensor(values, [1, 1]),  # the tiles' shapes are set with the configuration
        TensorDescriptor.from_tensor(weight, [1, 1]),
        scales,
        weight_scales,
        weight_scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        256 if rows <= 512 else 1024 if rows <= 2048 else 4096,
        BIAS=bias is not None,
    )


def _set_tiles(arguments: dict[str, Any]) -> None:
    """The memory accelerator's descriptors are made on the host, for the tiles of the configuration."""
    arguments["values"].block_shape = [arguments["BLOCK_M"], arguments["BLOCK_K"]]
    arguments["weight"].block_shape = [arguments["BLOCK_N"], arguments["BLOCK_K"]]


def _tiles(m: int, n: int, k: int, stages: int, warps: int) -> Any:
    tiles = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return triton.Config(tiles, num_stages=stages, num_warps=warps, pre_hook=_set_tiles)


def _columns(n: int, k: int, stages: int, warps: int) -> Any:
    return triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_stages=stages, num_warps=warps)


MANY_ROWS = [
    _tiles(128, 256, 128, 4, 8),
    _tiles(128, 256, 128, 3, 8),
    _tiles(256, 128, 128, 4, 8),
    _tiles(128, 128, 128, 4, 8),
    _tiles(128, 128, 128, 5, 4),
    _tiles(64, 128, 128, 5, 4),
    _tiles(64, 256, 128, 4, 4),
    _tiles(64, 64, 256, 4, 4),
]
FEW_ROWS_TILES = [
    _columns(16, 256, 6, 2),
    _columns(16, 512, 4, 4),
    _columns(32, 256, 5, 4),
    _columns(32, 512, 4, 4),
    _columns(64, 128, 6, 4),
    _columns(64, 256, 4, 4),
    _columns(128, 128, 5, 4),
    _columns(128, 256, 3, 8),
]
# Nothing can be timed under the interpreter: it takes the first of these.
_LARGE = [_tiles(32, 32, 64, 1, 1)] if INTERPRETED else MANY_ROWS
_SMALL = [_columns(32, 64, 1, 1)] if INTERPRETED else FEW_ROWS_TILES


@kernel
def scaled(sums, scales, weight_scales_ptr, bias_ptr, n, outputs, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The epilogue, one formula for every kernel: sums [M, N] int32, scales [M] and output channels n [N] → float32."""
    weight_scales = tl.load(weight_scales_ptr + n, mask=n < outputs, other=0.0)
    bias = tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
    scaled = sums.to(tl.float32) * scales[:, None]
    if BIAS:
        # A fused multiply-add by name, so that no compiler fuses in one kernel what it rounds in between in another.
        factor, added = tl.broadcast(weight_scales[None, :], scaled), tl.broadcast(bias[None, :], scaled)
        return tl.fma(scaled, factor[0], added[0])
    return scaled * weight_scales[None, :]


@triton.autotune(configs=_LARGE, key=["outputs", "inputs", "bucket"])  # type: ignore[untyped-decorator]
@kernel_of_any("rows")
def _many_rows_kernel(  # type: ignore[no-untyped-def]
    values,  # descriptor of [T, K]
    weight,  # descriptor of [N, K]
    scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    bucket,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Eight rows of tiles are walked column by column, so that their activations and a weight tile stay in the L2 cache.
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (8 * tiles_n) * 8
    height = min(tiles_m - first_m, 8)
    row = (first_m + tile % (8 * tiles_n) % height) * BLOCK_M
    column = tile % (8 * tiles_n) // height * BLOCK_N
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for k in range(0, inputs, BLOCK_K):
        sums = tl.dot(values.load([row, k]), weight.load([column, k]).T, sums, out_dtype=tl.int32)
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    scales = tl.load(scales_ptr + m, mask=m < rows, other=0.0)
    y = scaled(sums, scales, weight_scales_ptr, bias_ptr, n, outputs, BIAS)
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.autotune(configs=_SMALL, key=["outputs", "inputs", "BLOCK_M"])  # type: ignore[untyped-decorator]
@kernel_of_any("rows")
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    weight_ptr,
    scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    rows,
    outputs,
    inputs,
    share,  # inputs of one split
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * share
    last = min(first + share, inputs)
    values_row = values_ptr + m[:, None] * inputs
    weight_row = weight_ptr + n.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(first, last, BLOCK_K):
        at = start + k
        inside = (at < last)[None, :]
        x = tl.load(values_row + at[None, :], mask=inside & (m < rows)[:, None], other=0)
        # Each weight is read once by one program: it need not stay in the cache.
        w = tl.load(
            weight_row + at[None, :], mask=inside & (n < outputs)[:, None], other=0, eviction_policy="evict_first"
        )
        sums = tl.dot(x, w.T, sums, out_dtype=tl.int32)
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    at = m[:, None] * outputs + n[None, :]
    if SPLIT:
        tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * rows * outputs + at, sums, mask=mask)
    else:
        scales = tl.load(scales_ptr + m, mask=m < rows, other=0.0)
        y = scaled(sums, scales, weight_scales_ptr, bias_ptr, n, outputs, BIAS)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@kernel_of_any("rows")
def _add_splits_kernel(  # type: ignore[no-untyped-def]
    sums_ptr,  # [S, T, N] int32
    scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    splits,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    m = tl.program_id(0) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < outputs)[None, :]
    at = m[:, None] * outputs + n[None, :]
    sums = tl.zeros((1, BLOCK_N), dtype=tl.int32)
    for split in range(splits):
        sums += tl.load(sums_ptr + split * rows * outputs + at, mask=inside, other=0)
    y = scaled(sums, tl.load(scales_ptr + m), weight_scales_ptr, bias_ptr, n, outputs, BIAS)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


TUNERS = {"many rows": _many_rows_kernel, "few rows": _few_rows_kernel}  # whose tiles are chosen by trying
