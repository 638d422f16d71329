"""Attention of one sequence whose first KV passes through the device in segments: each adds to what is attended so far.

A launch attends all queries over one segment, split over programs where there are few queries; another joins the
parts with those before them by their log-sums (FlashAttention's rule, arXiv 2205.14135), in the order of the tokens.
The device reads a segment while the next is copied beside it.

Shapes: T new tokens, Hq query heads, Hkv key-value heads, G = Hq / Hkv, D head dimensions, S splits of a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
import triton.language as tl
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.launch import dot_type, kernel_of_any, power_of_two
from serving.kernels.gpu.planes import STAGES, Paged, attend
from serving.kernels.gpu.prompt_attention import TILES

FEW_ROWS = 16  # queries times heads of a decode step's tile, the least that matrix units take
PROGRAMS = 256  # wanted of a launch, two on each multiprocessor
SPLITS = 32  # at most
SHORTEST = 256  # tokens of one


@dataclass(frozen=True, slots=True)
class AttendedSoFar:
    """What queries have attended to so far: values [T, Hq, D], and log2 of the sums of their weights [T, Hq]."""

    values: Tensor
    log_sums: Tensor


def offloaded_attention(q: Tensor, paged: Paged, batch: RaggedBatch, scale: float, window: int | None) -> Tensor:
    """`paged_attention` of q [T, Hq, D] where the sequence's first tokens are `batch.offloaded`; `paged` has the rest.

    Nothing here waits for the device.
    """
    assert batch.offloaded is not None and len(batch.query_lens) == 1
    (context,), (count,) = batch.context_lens_list, batch.query_lens
    attended = AttendedSoFar(
        torch.zeros(q.shape, dtype=torch.float32, device=q.device),
        torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device),
    )
    start = context - count
    for segment in batch.offloaded.segments():
        k, v, *scales = segment.planes
        k_scale, v_scale = scales or (None, None)
        staged = Paged(k, v, k_scale, v_scale)
        staged.check()
        table = torch.arange(len(k), dtype=torch.int32, device=q.device)
        _attend_range(q, staged, table, segment.tokens, start - segment.first, scale, window, attended)
    first = batch.offloaded.tokens
    _attend_range(q, paged, batch.block_tables[0], context - first, start - first, scale, window, attended)
    return attended.values.to(q.dtype)


def _attend_range(
    q: Tensor,
    paged: Paged,
    table: Tensor,
    tokens: int,
    start: int,
    scale: float,
    window: int | None,
    attended: AttendedSoFar,
) -> None:
    """Join `tokens` tokens in the blocks of `table`; the first query's position is `start`, counted from the first."""
    count, heads, head_dim = q.shape
    kv_heads = paged.k.shape[2]
    group = heads // kv_heads
    rows, tile = TILES[q.dtype]
    if count * group <= FEW_ROWS:
        rows = FEW_ROWS
    queries = rows // group
    query_tiles = -(-count // queries)
    splits = min(SPLITS, -(-tokens // SHORTEST), -(-PROGRAMS // (query_tiles * kv_heads)))
    partial = torch.empty((count, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    block_d = max(16, power_of_two(head_dim))
    wide = q.dtype is torch.float32
    _range_kernel[(query_tiles, kv_heads, splits)](
        q,
        *paged.tensors(),
        table,
        partial,
        log_sums,
        scale * log2(e),
        0 if window is None else window,
        q.stride(0),
        q.stride(1),
        *paged.strides(),
        count,
        start,
        tokens,
        HEADS=heads,
        GROUP=group,
        QUERIES=queries,
        ROWS=rows,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=paged.k.shape[1],
        TILE=tile,
        WINDOW=window is not None,
        INT8=paged.int8,
        DOT=dot_type(q.dtype),
        num_warps=8,
        num_stages=1 if wide else STAGES if block_d <= 128 else 3,
    )
    _join_kernel[(count, heads)](
        partial,
        log_sums,
        attended.values,
        attended.log_sums,
        splits,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        SPLITS=SPLITS,
    )


@kernel_of_any("count", "start", "tokens")
def _range_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    partial_ptr,  # [T, Hq, S, D] float32: each split's own softmax
    log_sums_ptr,  # [T, Hq, S] float32: log2 of its sum
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
    count,
    start,
    tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    DOT: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    first_query = tl.program_id(0) * QUERIES
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    query = first_query + r // GROUP
    heads = head * GROUP + r % GROUP
    used = (r < QUERIES * GROUP) & (query < count)
    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    row = query.to(tl.int64)
    q = tl.load(q_ptr + row[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0).to(DOT)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    begin = 0
    if WINDOW:
        begin = max(start + first_query - window + 1, 0) // TILE * TILE
    end = min(start + min(first_query + QUERIES, count), tokens)  # what the tile's last query sees
    length = tl.cdiv(tl.cdiv(max(end - begin, 0), TILE), tl.num_programs(2)) * TILE
    mine = begin + split * length
    planes = k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head
    strides = plane_block, plane_token, plane_head, scale_block, scale_token, scale_head
    for position in range(mine, min(mine + length, end), TILE):
        top, total, acc = attend(
            q, top, total, acc, position + tl.arange(0, TILE), tokens, start + query, planes, strides, scale_log2,
            window, HEAD_DIM, BLOCK_D, BLOCK_SIZE, True, WINDOW, INT8, q_ptr.dtype.element_ty,
        )  # fmt: skip
    divisor = tl.where(total > 0, total, 1.0)
    at = (row * HEADS + heads) * tl.num_programs(2) + split
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + d[None, :], acc / divisor[:, None], mask=mask)
    tl.store(log_sums_ptr + at, top + tl.log2(divisor), mask=used)  # -inf where nothing was seen


@kernel_of_any("splits")
def _join_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    log_sums_ptr,
    values_ptr,
    all_log_sums_ptr,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    there, inside = split < splits, d < HEAD_DIM
    log_sums = tl.load(log_sums_ptr + row * splits + split, mask=there, other=float("-inf"))
    at = (row * splits + split)[:, None] * HEAD_DIM + d[None, :]
    parts = tl.load(partial_ptr + at, mask=there[:, None] & inside[None, :], other=0.0)
    before = tl.load(all_log_sums_ptr + row)
    values = tl.load(values_ptr + row * HEAD_DIM + d, mask=inside, other=0.0)
    top = tl.maximum(tl.max(log_sums, axis=0), before)
    shift = tl.where(top == float("-inf"), 0.0, top)  # nothing seen so far: weights of 0, and not NaN
    weights, kept = tl.exp2(log_sums - shift), tl.exp2(before - shift)
    total = tl.sum(weights, axis=0) + kept
    divisor = tl.where(total > 0, total, 1.0)
    y = (tl.sum(parts * weights[:, None], axis=0) + values * kept) / divisor
    tl.store(values_ptr + row * HEAD_DIM + d, y, mask=inside)
    tl.store(all_log_sums_ptr + row, top + tl.log2(divisor))
