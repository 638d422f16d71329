"""Attention of many queries per sequence over paged context: prompts whole or in chunks, several of them in one launch.

A tile holds some consecutive queries of one sequence with all their heads of one key-value head. Which sequence a
program works on it finds itself, from the offsets on the device.

Shapes: T new tokens, B sequences, Hq query heads, Hkv key-value heads, G = Hq / Hkv, D head dimensions.
"""

from __future__ import annotations

from math import e, log2

import torch
import triton.language as tl
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.launch import dot_type, kernel, kernel_of_any, power_of_two
from serving.kernels.gpu.planes import STAGES, Paged, attend

# Queries times heads of one tile, and tokens of context taken at once: two warp groups' worth of the matrix units. For
# float32 there are none, and a smaller tile leaves room in the registers.
TILES = {torch.bfloat16: (128, 64), torch.float16: (128, 64), torch.float32: (64, 32)}
LARGEST_GROUP = 64


def prompt_attention(
    q: Tensor, paged: Paged, batch: RaggedBatch, scale: float, window: int | None, out: Tensor
) -> None:
    """For every sequence with more than one query, its rows of `out` [T, Hq, D]; see `paged_attention`."""
    heads, head_dim = q.shape[1:]
    kv_heads, sequences = paged.k.shape[2], len(batch.query_lens)
    group = heads // kv_heads
    rows, tile = TILES[q.dtype]
    queries = rows // group
    # Sequence b's tiles are numbered from query_start[b] // queries + b: never fewer than it needs.
    tiles = q.shape[0] // queries + sequences
    block_d = max(16, power_of_two(head_dim))
    wide = q.dtype is torch.float32
    _prompt_kernel[(tiles, kv_heads)](
        q,
        *paged.tensors(),
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        out,
        scale * log2(e),
        0 if window is None else window,
        q.stride(0),
        q.stride(1),
        *paged.strides(),
        batch.block_tables.stride(0),
        sequences,
        sequences.bit_length(),
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


@kernel
def _sequence_of(query_start_ptr, tile, sequences, search, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low, high = sequences * 0, sequences
    for _ in range(search):
        middle = (low + high) // 2
        first = tl.load(query_start_ptr + middle) // QUERIES + middle
        before = first <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@kernel_of_any("table_stride", "sequences", "search")
def _prompt_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tables_ptr,
    query_start_ptr,
    context_ptr,
    out_ptr,
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
    sequences,
    search,  # bits of `sequences`
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
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(query_start_ptr, tile, sequences, search, QUERIES)
    first_row = tl.load(query_start_ptr + sequence)
    count = tl.load(query_start_ptr + sequence + 1) - first_row
    first_query = (tile - first_row // QUERIES - sequence) * QUERIES
    if first_query >= count:
        return
    if count == 1:
        return
    context = tl.load(context_ptr + sequence)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    query = first_query + r // GROUP
    heads = head * GROUP + r % GROUP
    used = (r < QUERIES * GROUP) & (query < count)
    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    row = first_row.to(tl.int64) + query
    q = tl.load(q_ptr + row[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0.0).to(DOT)
    last = context - count + query
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride

    # Tiles of context begin at multiples of TILE whatever the queries are:
    #   begin ..... lower   some query's window begins here
    #   lower ..... upper   every query sees all of it
    #   upper ..... end     some query must not see all of it
    first_last = context - count + first_query  # what the tile's first query may see, and its last
    final_last = min(context - count + first_query + QUERIES - 1, context - 1)
    begin, lower = 0, 0
    if WINDOW:
        begin = max(first_last - window + 1, 0) // TILE * TILE
        lower = tl.cdiv(max(final_last - window + 1, 0), TILE) * TILE
    end = final_last + 1
    upper = (first_last + 1) // TILE * TILE
    lower = min(lower, end)
    upper = max(upper, lower)
    planes = k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head
    strides = plane_block, plane_token, plane_head, scale_block, scale_token, scale_head
    borders = begin, lower, upper, end
    for part in tl.static_range(0 if WINDOW else 1, 3):
        for position in range(borders[part], borders[part + 1], TILE):
            top, total, acc = attend(
                q, top, total, acc, position + tl.arange(0, TILE), context, last, planes, strides, scale_log2, window,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, part != 1, WINDOW, INT8, out_ptr.dtype.element_ty,
            )  # fmt: skip
    y = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = row * HEADS + heads
    tl.store(out_ptr + at[:, None] * HEAD_DIM + d[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
