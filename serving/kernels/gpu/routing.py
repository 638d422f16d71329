"""Which experts rows go to, and rows in the order of their experts: what a grouped product reads (grouped_linear).

The host learns of neither. What is launched and how large anything is follows from the number of rows alone, so a step
with a mixture of experts can be captured in a CUDA graph. Rows of an expert keep their order.

Shapes: T rows, E experts, K experts of a row, P = T · K pairs of a row and one of its experts, B blocks of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import INTERPRETED, kernel_of_any, power_of_two, require, require_device, require_float

MOST_EXPERTS = 1024  # a row's scores have to fit into the registers of one program
SCORES = 512  # of one program, unless a single row has more
PAIRS = 64 if INTERPRETED else 1024  # of one turn of the programs that put them in order
HEIGHTS = (16, 32, 64, 128)  # rows of a block: a power of two, at least what a matrix unit takes

EPSILON = tl.constexpr(1e-20)  # as in serving.model.moe.route
LOWEST = tl.constexpr(-(2**31))  # the key of what is not chosen
ABSENT = tl.constexpr(-1)  # the expert of a block that there is not


class ExpertRows(NamedTuple):
    """Pairs in the order of their experts, in blocks of at most `height`, each of one expert's."""

    order: Tensor  # [P] int32: pairs, row * K + which of its experts; what follows the last one means nothing
    blocks: Tensor  # [3, B] int32: the expert, or -1 for none; the first place in `order`, and the one after its last
    height: int


def supported(experts: int) -> bool:
    """True if rows can be routed among so many."""
    return 0 < experts <= MOST_EXPERTS


def route(logits: Tensor, top_k: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """The experts [T, K] int32 of each row, best first, and their weights [T, K] float32, of logits [T, E], any float.

    Weights are the softmax over all experts; with `normalized` those of a row sum to 1. Of equal logits the first
    expert goes first. A row with a NaN has experts, and NaN for weights. ValueError for other types and sizes.
    """
    require_device(logits)
    require_float("logits", logits)
    require(logits.dim() == 2 and logits.is_contiguous(), "logits must be [T, E] and contiguous")
    rows, experts = logits.shape
    require(supported(experts), f"{experts} experts: there may be 1 to {MOST_EXPERTS}")
    require(0 < top_k <= experts, f"a row cannot take {top_k} of {experts} experts")
    chosen = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    if rows:
        block = power_of_two(experts)
        tall = max(1, SCORES // block)
        _route_kernel[(triton.cdiv(rows, tall),)](
            logits,
            chosen,
            weights,
            rows,
            experts,
            NORMALIZED=normalized,
            TOP_K=top_k,
            SLOTS=power_of_two(top_k),
            ROWS=tall,
            BLOCK=block,
        )
    return chosen, weights


def by_expert(chosen: Tensor, held: range, experts: int) -> ExpertRows:
    """Rows by the experts that they take, of so many: chosen [T, K] int32. Pairs of others than `held` are left out.

    Experts of blocks are counted from the first that is held.
    """
    require_device(chosen)
    require(chosen.dtype is torch.int32 and chosen.is_contiguous(), "chosen must be int32 and contiguous")
    require(supported(experts), f"{experts} experts: there may be 1 to {MOST_EXPERTS}")
    require(held.step == 1 and 0 <= held.start < held.stop <= experts, f"{held} of {experts} experts")
    pairs, device = chosen.numel(), chosen.device
    height = block_height(pairs, experts)
    count = most_blocks(pairs, len(held), height)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty((3, count), dtype=torch.int32, device=device)
    if pairs:
        counts = torch.empty(len(held), dtype=torch.int32, device=device)
        _count_kernel[(len(held),)](chosen, counts, pairs, held.start, TILE=PAIRS)
        _place_kernel[(len(held),)](
            chosen,
            counts,
            order,
            blocks,
            pairs,
            count,
            height,
            held.start,
            EXPERTS=len(held),
            BLOCK_E=power_of_two(len(held)),
            TILE=PAIRS,
        )
    return ExpertRows(order, blocks, height)


def block_height(pairs: int, experts: int) -> int:
    """Rows of a block: twice what an expert has in the mean, so that most experts' weights are read once."""
    wanted = 2 * pairs / experts
    return next((height for height in HEIGHTS if height >= wanted), HEIGHTS[-1])


def most_blocks(pairs: int, experts: int, height: int) -> int:
    """Blocks of so many pairs, however they fall on the experts."""
    return (pairs + min(pairs, experts) * (height - 1)) // height


@kernel_of_any("rows")
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    chosen_ptr,
    weights_ptr,
    rows,
    experts,
    NORMALIZED: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, slot = tl.arange(0, BLOCK)[None, :], tl.arange(0, SLOTS)[None, :]
    inside = tl.broadcast_to(expert < experts, (ROWS, BLOCK))
    mask = inside & (row < rows)[:, None]
    logits = tl.load(logits_ptr + row[:, None] * experts + expert, mask=mask, other=0.0).to(tl.float32)
    top = tl.max(tl.where(inside, logits, float("-inf")), axis=1)
    scores = tl.where(inside, tl.exp(logits - top[:, None]), 0.0)
    scores = tl.div_rn(scores, tl.broadcast_to(tl.sum(scores, axis=1)[:, None], (ROWS, BLOCK)))
    # Whole numbers in the order of the logits, so that a NaN has a place too and whoever is chosen is an expert.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 is no less than 0.0
    keys = tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST + 1)
    keys = tl.where(inside, keys, LOWEST)
    chosen = tl.zeros((ROWS, SLOTS), dtype=tl.int32)
    weights = tl.zeros((ROWS, SLOTS), dtype=tl.float32)
    for k in range(TOP_K):
        best = tl.argmax(keys, axis=1)[:, None]
        taken = expert == best
        chosen = tl.where(slot == k, best, chosen)
        weights = tl.where(slot == k, tl.sum(tl.where(taken, scores, 0.0), axis=1)[:, None], weights)
        keys = tl.where(taken, LOWEST, keys)
    if NORMALIZED:
        weights = tl.div_rn(weights, tl.broadcast_to((tl.sum(weights, axis=1) + EPSILON)[:, None], (ROWS, SLOTS)))
    at, kept = row[:, None] * TOP_K + slot, (row < rows)[:, None] & (slot < TOP_K)
    tl.store(chosen_ptr + at, chosen, mask=kept)
    tl.store(weights_ptr + at, weights, mask=kept)


@kernel_of_any("pairs", "first")
def _count_kernel(chosen_ptr, counts_ptr, pairs, first, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program e counts the pairs of the e-th expert that is held."""
    expert = tl.program_id(0)
    found = tl.zeros((TILE,), dtype=tl.int32)
    for start in range(0, pairs, TILE):
        at = start + tl.arange(0, TILE)
        found += (tl.load(chosen_ptr + at, mask=at < pairs, other=-1) == first + expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, axis=0))


@kernel_of_any("pairs", "blocks", "height", "first")
def _place_kernel(  # type: ignore[no-untyped-def]
    chosen_ptr,
    counts_ptr,
    order_ptr,
    blocks_ptr,
    pairs,
    blocks,
    height,
    first,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program e writes the pairs and the blocks of the e-th expert that is held, behind those of the experts before it;
    the last one also the blocks that there are not.
    """
    expert = tl.program_id(0)
    others, turn = tl.arange(0, BLOCK_E), tl.arange(0, TILE)
    counts = tl.load(counts_ptr + others, mask=others < EXPERTS, other=0)
    taken = (counts + height - 1) // height
    place = tl.sum(tl.where(others < expert, counts, 0), axis=0)
    block = tl.sum(tl.where(others < expert, taken, 0), axis=0)
    end = place + tl.sum(tl.where(others == expert, counts, 0), axis=0)
    end_block = block + tl.sum(tl.where(others == expert, taken, 0), axis=0)
    last = tl.where(expert == EXPERTS - 1, blocks, end_block)
    for start in range(0, last - block, TILE):
        number = start + turn
        own, at = block + number < end_block, block + number < last
        begin = place + number * height
        tl.store(blocks_ptr + block + number, tl.where(own, expert, ABSENT), mask=at)
        tl.store(blocks_ptr + blocks + block + number, begin, mask=at)
        tl.store(blocks_ptr + 2 * blocks + block + number, tl.minimum(begin + height, end), mask=at)
    for start in range(0, pairs, TILE):
        at = start + turn
        own = tl.load(chosen_ptr + at, mask=at < pairs, other=-1) == first + expert
        rank = tl.cumsum(own.to(tl.int32), axis=0)
        tl.store(order_ptr + place + rank - 1, at, mask=own)
        place += tl.sum(own.to(tl.int32), axis=0)
