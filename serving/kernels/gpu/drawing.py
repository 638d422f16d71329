"""Draws tokens from logits on the device: kept ones in the order of their ids, each as wide as its probability.

It means what `serving.sampling.torch_sampling.draw` means, without sorting and without waiting. It knows columns of
parameters, and no sequences.

Shapes: R rows, V vocabulary, T tiles of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import kernel, kernel_of_any, power_of_two, require, require_device
from serving.kernels.gpu.radix_search import KEPT, TILE, DrawColumns, find_kept
from serving.kernels.gpu.ranked_weights import ASKED, LARGEST_VOCABULARY, ranked, weight_scale


def supported(vocab: int) -> bool:
    """True if tokens can be drawn of so many."""
    return 0 < vocab <= LARGEST_VOCABULARY


def draw(logits: Tensor, peaks: Tensor, columns: DrawColumns) -> Tensor:
    """A token [R] int64 for each row of `logits` [R, V] float32 whose highest are `peaks` [R].

    Of a row whose peak is no finite number the token means nothing, but is of the vocabulary. ValueError for other
    types and shapes.
    """
    require_device(logits, peaks, columns.asked, columns.top_k)
    rows, vocab = logits.shape
    require(logits.dtype is peaks.dtype is torch.float32 and logits.stride(1) == 1, "logits must be rows of float32")
    asked, top_k, _, _ = columns
    require(asked.shape == (rows, ASKED.value) and asked.dtype is torch.float64, "asked must be float64 [R, 4]")
    require(top_k.shape == (rows,) and top_k.dtype is torch.int64, "top_k must be int64 [R]")
    require(supported(vocab), f"tokens are drawn of up to {LARGEST_VOCABULARY}, not of {vocab}")
    peaks, scale, tiles = peaks.where(peaks.isfinite(), 0.0), weight_scale(vocab), triton.cdiv(vocab, TILE)
    kept = find_kept(logits, peaks, columns, scale)
    sums = torch.empty(rows, 3, tiles, dtype=torch.int64, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    row = logits, logits.stride(0), peaks, columns.asked, kept, sums
    _weigh_kernel[(rows, tiles)](*row, vocab, SCALE=scale, TILE=TILE, CHUNK=TILE // 4, num_warps=8)
    _pick_kernel[(rows,)](*row, ids, tiles, vocab, SCALE=scale, TILE=TILE, TILES=power_of_two(tiles), num_warps=16)
    return ids


@kernel_of_any("logits_row", "vocab")
def _weigh_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    logits_row,
    peaks_ptr,
    asked_ptr,
    kept_ptr,
    sums_ptr,  # [R, 3, T] int64: weight of a tile's tokens before the bin, of those in it, and how many these are
    vocab,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    better, tied, ties = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
    for first in range(tile * TILE, min((tile + 1) * TILE, vocab), CHUNK):
        at = first + tl.arange(0, CHUNK)
        before, equal, weight = _sorted_out(
            logits_ptr + row * logits_row, at, vocab, row, peaks_ptr, asked_ptr, kept_ptr, SCALE
        )
        better += tl.where(before, weight, 0)
        tied += tl.where(equal, weight, 0)
        ties += equal.to(tl.int64)
    sums = sums_ptr + row * 3 * tiles + tile
    tl.store(sums, tl.sum(better, axis=0))
    tl.store(sums + tiles, tl.sum(tied, axis=0))
    tl.store(sums + 2 * tiles, tl.sum(ties, axis=0))


@kernel
def _sorted_out(logits_ptr, at, vocab, row, peaks_ptr, asked_ptr, kept_ptr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of tokens `at` [N]: whether they are better than the bin's, whether they are in the bin, and their weight."""
    kept = kept_ptr + row * KEPT
    leading, bits = tl.load(kept).to(tl.int32), tl.minimum(tl.load(kept + 1), 31).to(tl.int32)
    inside, key, _, weight = ranked(logits_ptr, at, vocab, tl.load(peaks_ptr + row), asked_ptr + row * ASKED, SCALE)
    head = key >> bits
    return inside & (head < leading), inside & (head == leading), weight


@kernel_of_any("logits_row", "tiles", "vocab")
def _pick_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    logits_row,
    peaks_ptr,
    asked_ptr,
    kept_ptr,
    sums_ptr,
    ids_ptr,
    tiles,
    vocab,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    bin_ptr = kept_ptr + row * KEPT
    room, each, whole = tl.load(bin_ptr + 2), tl.load(bin_ptr + 3), tl.load(bin_ptr + 4)
    # First the tile that the number falls into, then the token in it.
    tile = tl.arange(0, TILES)
    at, there = sums_ptr + row * 3 * tiles + tile, tile < tiles
    better, tied = tl.load(at, mask=there, other=0), tl.load(at + tiles, mask=there, other=0)
    ties = tl.load(at + 2 * tiles, mask=there, other=0)
    tied_before = tl.cumsum(ties, axis=0) - ties
    taken = tl.minimum(tl.maximum(room - tied_before, 0), ties)
    weights = better + tl.where(whole > 0, tied, taken * each)
    sums = tl.cumsum(weights, axis=0)
    total = tl.sum(weights, axis=0)
    number = tl.load(asked_ptr + row * ASKED + 3)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32), axis=0), tiles - 1)
    base = tl.sum(tl.where(tile == chosen, sums - weights, 0), axis=0)
    tied_base = tl.sum(tl.where(tile == chosen, tied_before, 0), axis=0)
    token = chosen * TILE + tl.arange(0, TILE)
    before, equal, weight = _sorted_out(
        logits_ptr + row * logits_row, token, vocab, row, peaks_ptr, asked_ptr, kept_ptr, SCALE
    )
    place = tied_base + tl.cumsum(equal.to(tl.int64), axis=0)  # from 1 on
    kept = before | (equal & ((whole > 0) | (place <= room)))
    passed = base + tl.cumsum(tl.where(kept, weight, 0), axis=0) <= target
    tl.store(ids_ptr + row, tl.minimum(chosen * TILE + tl.sum(passed.to(tl.int32), axis=0), vocab - 1).to(tl.int64))
