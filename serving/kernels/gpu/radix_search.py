"""Finds which tokens of a row min-p, top-k and top-p keep, without sorting: a radix search over their keys.

A search looks for the bin of keys that the last kept token lies in, by four more leading bits at a time, until the bin
holds equal keys, a single token, or nothing but kept ones. Equal keys are ranked by id. Weights are whole numbers:
their sums are exact, whatever programs add them in whatever order. It knows columns of parameters, and draws nothing.

    | kept: keys that begin with less | the bin: `room` of its tokens are kept, lowest ids first | dropped |

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import kernel, kernel_of_any
from serving.kernels.gpu.ranked_weights import ASKED, ranked

TILE = 4096  # tokens of one program
CHUNK = 256  # of them, put into bins at once
DIGIT = tl.constexpr(4)  # bits of a key that a pass looks at
BINS = tl.constexpr(16)
PASSES = tl.constexpr(8)  # of a key's 32 bits
STATE = tl.constexpr(6)  # see `_state`
KEPT = tl.constexpr(5)  # the bin's leading bits, how many bits follow, room, weight of each, are all of it kept
NEVER = tl.constexpr(2**63 - 1)  # a weight that is not reached: nothing more is dropped


class DrawColumns(NamedTuple):
    """What R rows ask for: `asked` [R, 4] float64 of temperature, min-p, top-p and a number in [0, 1).

    `top_k` [R] int64, V for all. `bounded`: some row has min-p or top-k; `nucleus`: some has top-p.
    """

    asked: Tensor
    top_k: Tensor
    bounded: bool
    nucleus: bool


def find_kept(logits: Tensor, peaks: Tensor, columns: DrawColumns, scale: float) -> Tensor:
    """What is kept of each row of `logits` [R, V], whose highest are `peaks` [R]: int64 [R, KEPT]."""
    rows, vocab = logits.shape
    passes, whole = PASSES.value, torch.int64
    surveyed, kept = logits.new_zeros((rows, 2), dtype=whole), logits.new_empty((rows, KEPT.value), dtype=whole)
    goals, states = logits.new_empty(rows, dtype=whole), logits.new_empty((rows, passes, STATE.value), dtype=whole)
    tiles, row = (rows, triton.cdiv(vocab, TILE)), (logits, logits.stride(0), peaks, columns.asked)
    _survey_kernel[tiles](*row, surveyed, vocab, SCALE=scale, TILE=TILE, CHUNK=TILE // 4, num_warps=8)

    def search(by_weight: bool) -> Tensor:
        bins = logits.new_zeros((rows, passes, 2, BINS.value), dtype=whole)
        for number in range(passes):
            found = goals, states, bins, number
            sizes = {"SCALE": scale, "BY_WEIGHT": by_weight, "TILE": TILE, "CHUNK": CHUNK}
            _search_kernel[tiles](*row, *found, vocab, **sizes, num_warps=8)
        return bins

    bins = surveyed  # in whose place it is not read
    if columns.bounded:
        _begin_bound_kernel[(rows,)](surveyed, columns.top_k, goals, states, vocab)
        bins = search(by_weight=False)
    _begin_nucleus_kernel[(rows,)](surveyed, columns.asked, goals, states, bins, kept, vocab, BOUNDED=columns.bounded)
    if columns.nucleus:
        _end_nucleus_kernel[(rows,)](columns.asked, goals, states, search(by_weight=True), kept)
    return kept


@kernel_of_any("logits_row", "vocab")
def _survey_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    logits_row,
    peaks_ptr,
    asked_ptr,
    surveyed_ptr,  # [R, 2] int64: the weight of all tokens, and how many pass min-p
    vocab,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, asked = tl.load(peaks_ptr + row), asked_ptr + row * ASKED
    min_p = tl.load(asked + 1)
    weights, enough = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
    for first in range(tile * TILE, min((tile + 1) * TILE, vocab), CHUNK):
        inside, _, shares, weight = ranked(
            logits_ptr + row * logits_row, first + tl.arange(0, CHUNK), vocab, peak, asked, SCALE
        )
        weights += weight
        enough += (inside & (shares >= min_p)).to(tl.int64)
    tl.atomic_add(surveyed_ptr + 2 * row, tl.sum(weights, axis=0), sem="relaxed")
    tl.atomic_add(surveyed_ptr + 2 * row + 1, tl.sum(enough, axis=0), sem="relaxed")


@kernel
def _store(at, leading, bits, better, better_weight, count, weight):  # type: ignore[no-untyped-def]
    tl.store(at, leading)
    tl.store(at + 1, bits)
    tl.store(at + 2, better)
    tl.store(at + 3, better_weight)
    tl.store(at + 4, count)
    tl.store(at + 5, weight)


@kernel
def _wide(bits, better, better_weight, count, weight, goal, BY_WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the bin has to be divided: tokens of different keys in it, some kept and some perhaps not."""
    if BY_WEIGHT:
        return (bits > 0) & (count > 1) & (goal <= better_weight + weight)
    return (bits > 0) & (goal < better + count)


@kernel
def _state(states_row, bins_row, number, goal, BY_WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A search's state before its pass `number`: the one before, its bin divided as that pass has counted.

    The leading bits of the bin's keys, and how many bits follow them; number and weight of the tokens of lesser keys;
    number and weight of the bin's. The goal is what those kept have at least: a number, or BY_WEIGHT a weight.
    """
    before = tl.maximum(number - 1, 0)
    at, digits = states_row + before * STATE, tl.arange(0, BINS)
    leading, bits = tl.load(at), tl.load(at + 1)
    better, better_weight, count, weight = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    if (number > 0) & _wide(bits, better, better_weight, count, weight, goal, BY_WEIGHT):
        counts = tl.load(bins_row + before * 2 * BINS + digits)
        weights = tl.load(bins_row + (before * 2 + 1) * BINS + digits)
        sums = better_weight + tl.cumsum(weights, axis=0) if BY_WEIGHT else better + tl.cumsum(counts, axis=0)
        digit = tl.minimum(tl.sum((sums < goal).to(tl.int32), axis=0), BINS - 1)
        better += tl.sum(tl.where(digits < digit, counts, 0), axis=0)
        better_weight += tl.sum(tl.where(digits < digit, weights, 0), axis=0)
        count = tl.sum(tl.where(digits == digit, counts, 0), axis=0)
        weight = tl.sum(tl.where(digits == digit, weights, 0), axis=0)
        leading, bits = leading * BINS + digit, bits - DIGIT
    return leading, bits, better, better_weight, count, weight


@kernel_of_any("logits_row", "number", "vocab")
def _search_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    logits_row,
    peaks_ptr,
    asked_ptr,
    goals_ptr,
    states_ptr,  # [R, PASSES, STATE] int64, before each pass: that of the first is given
    bins_ptr,  # [R, PASSES, 2, BINS] int64 of zeros, to which this pass adds number and weight of its tokens by digit
    number,
    vocab,
    SCALE: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    goal = tl.load(goals_ptr + row)
    states_row, bins_row = states_ptr + row * PASSES * STATE, bins_ptr + row * PASSES * 2 * BINS
    leading, bits, better, better_weight, count, weight = _state(states_row, bins_row, number, goal, BY_WEIGHT)
    if (tile == 0) & (number > 0):
        _store(states_row + number * STATE, leading, bits, better, better_weight, count, weight)
    if not _wide(bits, better, better_weight, count, weight, goal, BY_WEIGHT):
        return
    peak, asked = tl.load(peaks_ptr + row), asked_ptr + row * ASKED
    shift, follow, head = (bits - DIGIT).to(tl.int32), tl.minimum(bits, 31).to(tl.int32), leading.to(tl.int32)
    digits = tl.arange(0, BINS)[None, :]
    counts, weights = tl.zeros((CHUNK, BINS), tl.int32), tl.zeros((CHUNK, BINS), tl.int64)
    for first in range(tile * TILE, min((tile + 1) * TILE, vocab), CHUNK):
        inside, key, _, token = ranked(
            logits_ptr + row * logits_row, first + tl.arange(0, CHUNK), vocab, peak, asked, SCALE
        )
        digit = tl.where(inside & ((key >> follow) == head), (key >> shift) & (BINS - 1), BINS)
        hits = digit[:, None] == digits
        counts += hits.to(tl.int32)
        weights += tl.where(hits, token[:, None], 0)
    into = bins_row + number * 2 * BINS + tl.arange(0, BINS)
    tl.atomic_add(into, tl.sum(counts, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(into + BINS, tl.sum(weights, axis=0), sem="relaxed")


@kernel_of_any("vocab")
def _begin_bound_kernel(surveyed_ptr, top_k_ptr, goals_ptr, states_ptr, vocab):  # type: ignore[no-untyped-def]
    """Begin the search for the last token that min-p and top-k keep."""
    row = tl.program_id(0).to(tl.int64)
    weight, enough = tl.load(surveyed_ptr + 2 * row), tl.load(surveyed_ptr + 2 * row + 1)
    tl.store(goals_ptr + row, tl.maximum(tl.minimum(tl.load(top_k_ptr + row), enough), 1))
    _store(states_ptr + row * PASSES * STATE, 0, 32, 0, 0, vocab, weight)


@kernel
def _keep(kept_ptr, leading, bits, room, count, weight):  # type: ignore[no-untyped-def]
    tl.store(kept_ptr, leading)
    tl.store(kept_ptr + 1, bits)
    tl.store(kept_ptr + 2, room)
    tl.store(kept_ptr + 3, weight // tl.maximum(count, 1))
    tl.store(kept_ptr + 4, (room == count).to(tl.int64))


@kernel_of_any("vocab")
def _begin_nucleus_kernel(  # type: ignore[no-untyped-def]
    surveyed_ptr, asked_ptr, goals_ptr, states_ptr, bins_ptr, kept_ptr, vocab, BOUNDED: tl.constexpr
):
    """What min-p and top-k keep; and begin the search for the last token that top-p keeps of that."""
    row = tl.program_id(0).to(tl.int64)
    states_row, total = states_ptr + row * PASSES * STATE, tl.load(surveyed_ptr + 2 * row)
    mass = total
    if BOUNDED:
        goal = tl.load(goals_ptr + row)
        bins_row = bins_ptr + row * PASSES * 2 * BINS
        leading, bits, better, better_weight, count, weight = _state(states_row, bins_row, PASSES, goal, False)
        room = tl.minimum(goal - better, count)
        _keep(kept_ptr + row * KEPT, leading, bits, room, count, weight)
        mass = better_weight + tl.where(room == count, weight, room * (weight // tl.maximum(count, 1)))
    else:
        _store(states_row, 0, 32, 0, 0, vocab, total)
        _keep(kept_ptr + row * KEPT, 0, 32, vocab, vocab, total)
    top_p = tl.load(asked_ptr + row * ASKED + 2)
    nucleus = tl.minimum(tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1), mass)  # the best stays
    tl.store(goals_ptr + row, tl.where(top_p < 1, nucleus, NEVER))
    _store(states_row, 0, 32, 0, 0, vocab, total)


@kernel
def _end_nucleus_kernel(asked_ptr, goals_ptr, states_ptr, bins_ptr, kept_ptr):  # type: ignore[no-untyped-def]
    """What top-p keeps, where it drops any."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(asked_ptr + row * ASKED + 2) < 1:
        goal = tl.load(goals_ptr + row)
        states_row, bins_row = states_ptr + row * PASSES * STATE, bins_ptr + row * PASSES * 2 * BINS
        leading, bits, _, better_weight, count, weight = _state(states_row, bins_row, PASSES, goal, True)
        each = tl.maximum(weight // tl.maximum(count, 1), 1)
        room = tl.minimum((goal - better_weight + each - 1) // each, count)
        _keep(kept_ptr + row * KEPT, leading, bits, room, count, weight)
