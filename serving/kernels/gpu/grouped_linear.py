"""What experts make of rows that go to them: products, each one launch for all experts, and the weighted sum.

Weights stay where they are: a table tells how far apart each expert's lie. Floats are multiplied as floats, float32 by
exact products; int8 as in `linear`, with the same sums of integers and the same epilogue.

Shapes: T rows, K experts of a row, P = T · K pairs, E experts, I inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import (
    FLOATS,
    INTERPRETED,
    dot_type,
    kernel_of_any,
    power_of_two,
    require,
    require_device,
    require_float,
)
from serving.kernels.gpu.linear import scaled
from serving.kernels.gpu.routing import ExpertRows
from serving.kernels.gpu.rows import Quantized, quantized_tile, silu_product, warps_of
from serving.kernels.gpu.rows import supported as supports_rows
from serving.kernels.layer_weights import LinearWeights
from serving.streams import streams_of

ALIGNED = 16  # bytes that are loaded at once
TILE_BYTES = 200 * 1024  # of shared memory: tiles of more are not tried
SUMMED = 1024  # outputs of one program that sums


class ExpertWeights(NamedTuple):
    """One linear layer of all experts, where its tensors lie: these have to outlive it."""

    first: LinearWeights  # of the first expert: weight [N, I], and of int8 float32 scales [N]
    table: Tensor  # [E, 2] int64: how many numbers behind those of the first an expert's weight and scales begin
    aligned: bool  # weights are a multiple of ALIGNED bytes apart

    @property
    def outputs(self) -> int:
        return self.first.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.first.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.weight.dtype

    @staticmethod
    def of(linears: Sequence[LinearWeights]) -> ExpertWeights:
        """Raises ValueError where they are not alike, or have biases or rotations."""
        first = linears[0].weight
        require_device(*(linear.weight for linear in linears))
        require(first.dtype is torch.int8 or first.dtype in FLOATS, f"weights of {first.dtype}")
        for linear in linears:
            weight, scale = linear.weight, linear.scale
            require(weight.shape == first.shape and weight.dtype == first.dtype, "experts must be alike")
            require(weight.is_contiguous(), "weights must be contiguous")
            require(linear.bias is None and not linear.rotation, "experts have neither biases nor rotations")
            require((scale is not None) == (weight.dtype is torch.int8), "int8 weights alone have scales")
            require(scale is None or (scale.dtype is torch.float32 and scale.is_contiguous()), "scales must be float32")
        behind = [[_behind(linear.weight, first), _behind(linear.scale, linears[0].scale)] for linear in linears]
        aligned = all(weight * first.element_size() % ALIGNED == 0 for weight, _ in behind)
        return ExpertWeights(linears[0], torch.tensor(behind, dtype=torch.int64, device=first.device), aligned)


def _behind(tensor: Tensor | None, first: Tensor | None) -> int:
    """How many numbers behind the first tensor this one begins."""
    if tensor is None or first is None:
        return 0
    streams = streams_of(first.device)
    behind, over = divmod(streams.address(tensor) - streams.address(first), first.element_size())
    require(over == 0, "weights must begin at multiples of their numbers' size")
    return behind


def grouped_linear(
    x: Tensor, scales: Tensor | None, rows: ExpertRows, weights: ExpertWeights, out_dtype: torch.dtype
) -> Tensor:
    """What a pair's expert makes of its row: [P, N] in `out_dtype`; of pairs that `rows` leaves out, anything.

    x [T, I] or [P, I], in which pairs of a row or each pair has one of its own, contiguous and of the weights' type;
    with int8 its scales float32 [T] or [P]. ValueError for other types, layouts and sizes.
    """
    pairs = len(rows.order)
    require_device(x, rows.order, weights.table)
    require(x.dtype is weights.dtype, f"rows of {x.dtype} do not go to weights of {weights.dtype}")
    require(x.dim() == 2 and x.is_contiguous() and x.shape[1] == weights.inputs, f"x must be [·, {weights.inputs}]")
    require((scales is not None) == (x.dtype is torch.int8), "int8 rows, and no others, have scales")
    require(scales is None or (scales.dtype is torch.float32 and scales.shape == x.shape[:1]), "scales must be float32")
    require(out_dtype in FLOATS, f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}")
    out = torch.empty((pairs, weights.outputs), dtype=out_dtype, device=x.device)
    if not pairs:
        return out
    require(pairs % len(x) == 0, f"{pairs} pairs of {len(x)} rows")
    blocks = rows.blocks.shape[1]
    _grouped_kernel[_grid(blocks, weights.outputs)](
        x,
        x if scales is None else scales,
        weights.first.weight,
        x if weights.first.scale is None else weights.first.scale,
        weights.table,
        rows.order,
        rows.blocks,
        out,
        pairs // len(x),
        blocks,
        weights.outputs,
        weights.inputs,
        DOT=None if scales is not None else dot_type(x.dtype),
        ALIGNED_WEIGHTS=ALIGNED // x.element_size() if weights.aligned else 0,
        BLOCK_M=rows.height,
    )
    return out


def pairs_silu_mul(gate_up: Tensor, chosen: Tensor, held: range, *, quantized: bool) -> Tensor | Quantized:
    """`silu_mul` of rows [P, 2W] whose expert, in `chosen` [T, K] int32, is held; of others, anything."""
    require_device(gate_up, chosen)
    require_float("gate_up", gate_up)
    pairs, width = chosen.numel(), gate_up.shape[1] // 2
    require(gate_up.shape == (pairs, 2 * width) and gate_up.is_contiguous(), f"gate_up must be [{pairs}, 2W]")
    require(chosen.dtype is torch.int32 and chosen.is_contiguous(), "chosen must be int32 and contiguous")
    require(supports_rows(width, gate_up.dtype), f"rows are not {width} wide")
    out = torch.empty((pairs, width), dtype=torch.int8 if quantized else gate_up.dtype, device=gate_up.device)
    scales = torch.empty(pairs if quantized else 0, dtype=torch.float32, device=gate_up.device)
    if pairs:
        block = power_of_two(width)
        _silu_kernel[(pairs,)](
            gate_up,
            chosen,
            out,
            scales,
            held.start,
            held.stop,
            width,
            QUANTIZE=quantized,
            BLOCK=block,
            num_warps=warps_of(block),
        )
    return Quantized(out, scales) if quantized else out


def weighted_sum(parts: Tensor, chosen: Tensor, weights: Tensor, held: range, out_dtype: torch.dtype) -> Tensor:
    """[T, N] in `out_dtype`: parts [P, N] times their weights [T, K] float32, added one after the other in float32.

    Parts of experts in `chosen` [T, K] int32 that are not held are left out.
    """
    require_device(parts, chosen, weights)
    require_float("parts", parts)
    (rows, top_k), width = chosen.shape, parts.shape[1]
    require(parts.shape == (rows * top_k, width) and parts.is_contiguous(), f"parts must be [{rows * top_k}, ·]")
    require(chosen.dtype is torch.int32 and chosen.is_contiguous(), "chosen must be int32 and contiguous")
    require(weights.dtype is torch.float32 and weights.shape == chosen.shape, f"weights must be [{rows}, {top_k}]")
    require(weights.is_contiguous(), "weights must be contiguous")
    out = torch.empty((rows, width), dtype=out_dtype, device=parts.device)
    if rows:
        block = min(SUMMED, power_of_two(width))
        grid = rows, triton.cdiv(width, block)
        _sum_kernel[grid](parts, chosen, weights, out, held.start, held.stop, width, TOP_K=top_k, BLOCK=block)
    return out


def _grid(blocks: int, outputs: int) -> Callable[[dict[str, int]], tuple[int]]:
    return lambda chosen: (blocks * triton.cdiv(outputs, chosen["BLOCK_N"]),)


def _tiles(n: int, k: int, stages: int, warps: int) -> Any:
    return triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_stages=stages, num_warps=warps)


TILES = [
    _tiles(64, 128, 4, 4),
    _tiles(128, 64, 3, 4),
    _tiles(128, 128, 3, 8),
    _tiles(256, 64, 3, 8),
    _tiles(32, 256, 4, 4),
]


def fitting(configs: Sequence[Any], arguments: dict[str, Any], *, BLOCK_M: int, **_: Any) -> list[Any]:
    """Of the tiles those whose inputs find room in a program's memory, at every stage."""
    each = arguments["x_ptr"].element_size()

    def taken(config: Any) -> int:
        tiles = config.kwargs
        return int(config.num_stages * (BLOCK_M + tiles["BLOCK_N"]) * tiles["BLOCK_K"] * each)

    return [config for config in configs if taken(config) <= TILE_BYTES] or [min(configs, key=taken)]


# Nothing can be timed under the interpreter.
_TILES = [_tiles(32, 32, 1, 1)] if INTERPRETED else TILES


@triton.autotune(  # type: ignore[untyped-decorator]
    configs=_TILES, key=["outputs", "inputs", "BLOCK_M"], prune_configs_by={"early_config_prune": fitting}
)
@kernel_of_any("sharing", "blocks")
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    scales_ptr,
    weight_ptr,  # of the first expert, and its scales
    weight_scales_ptr,
    table_ptr,  # [E, 2]
    order_ptr,
    blocks_ptr,  # [3, B]
    out_ptr,
    sharing,  # pairs of one row of x
    blocks,
    outputs,
    inputs,
    DOT: tl.constexpr,  # None: int8
    ALIGNED_WEIGHTS: tl.constexpr,  # numbers of which weights are a multiple apart; 0: of one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Eight blocks are walked column by column, so that the rows and weights they share stay in the L2 cache.
    tiles_n, program = tl.cdiv(outputs, BLOCK_N), tl.program_id(0)
    first_block = program // (8 * tiles_n) * 8
    beside = min(blocks - first_block, 8)
    block = first_block + program % (8 * tiles_n) % beside
    column = program % (8 * tiles_n) // beside * BLOCK_N
    expert = tl.load(blocks_ptr + block)
    if expert < 0:
        return
    place = tl.load(blocks_ptr + blocks + block) + tl.arange(0, BLOCK_M)
    used = place < tl.load(blocks_ptr + 2 * blocks + block)
    pair = tl.load(order_ptr + place, mask=used, other=0).to(tl.int64)
    n, k = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    behind = tl.load(table_ptr + 2 * expert)
    if ALIGNED_WEIGHTS:
        behind = tl.multiple_of(behind, ALIGNED_WEIGHTS)
    x_row = x_ptr + (pair // sharing)[:, None] * inputs
    weight_row = weight_ptr + behind + n.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if DOT is None else tl.float32)
    for start in range(0, inputs, BLOCK_K):
        at = start + k
        inside = (at < inputs)[None, :]
        x = tl.load(x_row + at[None, :], mask=inside & used[:, None], other=0)
        w = tl.load(weight_row + at[None, :], mask=inside & (n < outputs)[:, None], other=0)
        if DOT is None:
            sums = tl.dot(x, w.T, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(x.to(DOT), w.to(DOT).T, sums, input_precision="ieee")
    if DOT is None:
        scales = tl.load(scales_ptr + pair // sharing, mask=used, other=0.0)
        weight_scales = weight_scales_ptr + tl.load(table_ptr + 2 * expert + 1)
        y = scaled(sums, scales, weight_scales, weight_scales, n, outputs, False)
    else:
        y = sums
    at = pair[:, None] * outputs + n[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=used[:, None] & (n < outputs)[None, :])


@kernel_of_any("first", "end")
def _silu_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, chosen_ptr, out_ptr, scales_ptr, first, end, width, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen_ptr + pair)
    if (expert < first) | (expert >= end):
        return
    column = tl.arange(0, BLOCK)[None, :]
    inside, row = column < width, gate_up_ptr + pair * 2 * width
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width + column, mask=inside, other=0.0).to(tl.float32)
    product = silu_product(gate, up, gate_up_ptr.dtype.element_ty)
    if QUANTIZE:
        values, scale = quantized_tile(product.to(tl.float32))
        tl.store(out_ptr + pair * width + column, values, mask=inside)
        tl.store(scales_ptr + pair + tl.arange(0, 1), scale)
    else:
        tl.store(out_ptr + pair * width + column, product, mask=inside)


@kernel_of_any("first", "end")
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, chosen_ptr, weights_ptr, out_ptr, first, end, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(TOP_K):
        pair = row * TOP_K + k
        expert = tl.load(chosen_ptr + pair)
        if (expert >= first) & (expert < end):
            part = tl.load(parts_ptr + pair * width + column, mask=inside, other=0.0).to(tl.float32)
            total += part * tl.load(weights_ptr + pair)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


TUNERS = {"grouped": _grouped_kernel}  # whose tiles are chosen by trying
