"""Attention of one query per sequence: the context is split over programs, whose partial softmaxes are then combined.

A sequence has at most SPLITS splits. The device computes their length from the sequence's own context, so a row's sums
have the same order whatever the batch is, and a launch does not grow with the longest context. All query heads of a
key-value head are one tile of the product, so keys and values are read once.

Shapes: B sequences, Hq query heads, Hkv key-value heads, G = Hq / Hkv, D head dimensions, S splits of the launch.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton.language as tl
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.launch import dot_type, kernel, kernel_of_any, power_of_two
from serving.kernels.gpu.planes import STAGES, Paged, attend

# A power of two. With 8 key-value heads the splits of one sequence are 256 programs: two a multiprocessor of an H100.
SPLITS = 32
# Tokens of the shortest split and of one tile. A split of 256 tokens reads 128 KiB of bfloat16 keys and values and
# writes 2 KiB of partial sums (D 128, G 4); two tiles in flight on each of two programs hide the memory's latency.
SHORTEST = 256
TILE = 64


def splits_of(context: int, window: int | None) -> int:
    """The most splits that a query after up to `context` tokens of context may have."""
    seen = max(context, 1) if window is None else min(max(context, 1), window + TILE - 1)
    return min(SPLITS, -(-seen // SHORTEST))


def decode_attention(
    q: Tensor, paged: Paged, batch: RaggedBatch, scale: float, window: int | None, out: Tensor
) -> None:
    """For every sequence of the batch with one query, its row of `out` [T, Hq, D]; see `paged_attention`.

    The longest context is taken from `batch.context_lens_list`, a bound known without asking the device; a captured
    graph serves every batch within it.
    """
    heads, head_dim = q.shape[1:]
    kv_heads, sequences = paged.k.shape[2], len(batch.query_lens)
    splits = splits_of(max(batch.context_lens_list), window)
    shape = (sequences, heads, splits)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = max(16, power_of_two(head_dim))
    wide = q.dtype is torch.float32
    _decode_kernel[(sequences, kv_heads, splits)](
        q,
        *paged.tensors(),
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        partial,
        log_sums,
        scale * log2(e),
        0 if window is None else window,
        q.stride(0),
        q.stride(1),
        *paged.strides(),
        batch.block_tables.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        ROWS=max(16, power_of_two(heads // kv_heads)),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=paged.k.shape[1],
        SPLITS=SPLITS,
        SHORTEST=SHORTEST,
        TILE=TILE,
        WINDOW=window is not None,
        INT8=paged.int8,
        DOT=dot_type(q.dtype),
        num_warps=8 if wide or paged.int8 else 4,  # float32, and widening int8, take registers
        num_stages=1 if wide else STAGES if block_d <= 128 else 3,
    )
    _combine_kernel[(sequences, heads)](
        partial,
        log_sums,
        batch.query_start,
        batch.context_lens,
        out,
        0 if window is None else window,
        splits,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLITS=SPLITS,
        SHORTEST=SHORTEST,
        TILE=TILE,
        WINDOW=window is not None,
    )


@kernel
def _splits(  # type: ignore[no-untyped-def]
    context,
    window,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Where a sequence's first split begins, at a tile, and the length of its splits, whole tiles."""
    first = 0
    if WINDOW:
        first = max(context - window, 0) // TILE * TILE
    tiles = tl.cdiv(context - first, TILE)
    return first, max(tl.cdiv(tiles, SPLITS) * TILE, SHORTEST)


@kernel_of_any("table_stride")
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tables_ptr,
    query_start_ptr,
    context_ptr,
    partial_ptr,  # [B, Hq, S, D] float32: each split's own softmax
    log_sums_ptr,  # [B, Hq, S] float32: log2 of its sum
    scale_log2,
    window,
    q_token,
    q_head,
    plane_block,
    plane_token,
    plane_head,
    scale_block,
    scale_token,
    scale_head,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    DOT: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    if tl.load(query_start_ptr + sequence + 1) - token != 1:
        return
    context = tl.load(context_ptr + sequence)
    first, length = _splits(context, window, SPLITS, SHORTEST, TILE, WINDOW)
    start = first + tl.program_id(2) * length
    if start >= context:
        return
    member, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    mask = (member < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    heads = head * GROUP + member
    q = tl.load(q_ptr + token * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0).to(DOT)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    last = tl.zeros((ROWS,), dtype=tl.int32) + (context - 1)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    planes = k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head
    strides = plane_block, plane_token, plane_head, scale_block, scale_token, scale_head
    for tile in range(start, min(start + length, context), TILE):
        top, total, acc = attend(
            q, top, total, acc, tile + tl.arange(0, TILE), context, last, planes, strides, scale_log2, window,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, True, WINDOW, INT8, q_ptr.dtype.element_ty,
        )  # fmt: skip
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = (sequence.to(tl.int64) * HEADS + heads) * tl.num_programs(2) + tl.program_id(2)
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], y, mask=mask)
    tl.store(log_sums_ptr + at, top + tl.log2(total), mask=member < GROUP)


@kernel_of_any("splits")
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    log_sums_ptr,
    query_start_ptr,
    context_ptr,
    out_ptr,
    window,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # All splits are added at once, those that are not there as zeros: the order of the sums is always the same.
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    if tl.load(query_start_ptr + sequence + 1) - token != 1:
        return
    context = tl.load(context_ptr + sequence)
    first, length = _splits(context, window, SPLITS, SHORTEST, TILE, WINDOW)
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    there = split < tl.cdiv(context - first, length)
    at = (sequence.to(tl.int64) * HEADS + head) * splits + split
    log_sums = tl.load(log_sums_ptr + at, mask=there, other=float("-inf"))
    mask = there[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    top = tl.max(log_sums, axis=0)
    weights = tl.exp2(log_sums - tl.where(top == float("-inf"), 0.0, top))  # a sequence without context has no top
    total = tl.sum(weights, axis=0)
    y = tl.sum(values * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (token * HEADS + head) * HEAD_DIM + d, y.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
