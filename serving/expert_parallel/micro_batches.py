"""A step in two halves, which compute in turn: while rows of one travel, the other computes.

All ranks of a group run a step so, or none does: each of a layer's exchanges takes place twice. A rank whose rows
cannot be halved runs them as one half beside none. What a row's layers compute does not change. Nobody is told when a
layer's KV is complete.

Shapes: T rows of this rank, H hidden width.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.expert_parallel.layer import ExpertParallelMlp
from serving.model.decoder import Decoder, Layer, Planes
from serving.model.moe import FEWEST

LEAST_GAIN = 0.05  # of a step's time, from which on halves are worth their trouble

Note = Callable[[str, int, float, float], object]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a step, and their rows [T] of the whole."""

    batch: RaggedBatch
    rows: Tensor


def halves(batch: RaggedBatch) -> tuple[MicroBatch, MicroBatch | None]:
    """The sequences in two parts of about as many rows; one alone where a part would be too small.

    Few rows have other bits than many (`serving.model.moe.few_alike`): each part has four at least.
    """
    total, first, count = sum(batch.query_lens), 0, 0
    while count < len(batch.query_lens) and 2 * (first + batch.query_lens[count] // 2) < total:
        first += batch.query_lens[count]
        count += 1
    whole = MicroBatch(batch, torch.arange(total, device=batch.tokens.device))
    if min(first, total - first) < FEWEST:
        return whole, None
    return _part(batch, range(count)), _part(batch, range(count, len(batch.query_lens)))


def _part(batch: RaggedBatch, chosen: Sequence[int]) -> MicroBatch:
    part, rows = kernels.part_of(batch, chosen)
    long_rope = None if batch.long_rope is None else batch.long_rope[rows]
    tokens, positions, slots = batch.tokens[rows], batch.positions[rows], batch.slots[rows]
    return MicroBatch(replace(part, tokens=tokens, positions=positions, slots=slots, long_rope=long_rope), rows)


def overlapped_step(
    model: Decoder, batch: RaggedBatch | None, kv: Sequence[Planes], note: Note | None = None
) -> Tensor:
    """Hidden states [T, H] after the final norm, as the decoder's own step has them; `batch` None: of an idle rank.

    `note(what, half, began, seconds)` is told each piece of work, on the clock `time.perf_counter`.
    """
    first, second = (None, None) if batch is None else halves(batch)
    weight = model.norm.weight
    out_TH = weight.new_empty(0 if batch is None else len(batch.tokens), len(weight))
    running = [(number, _half(model, part, kv)) for number, part in enumerate((first, second))]
    while running:
        going = []
        for number, half in running:
            began, what = time.perf_counter(), "norm"
            try:
                what = next(half)
                going.append((number, half))
            except StopIteration as done:
                if done.value is not None:
                    rows, x_TH = done.value
                    out_TH[rows] = x_TH
            if note is not None:
                note(what, number, began, time.perf_counter() - began)
        running = going
    return out_TH


def _half(
    model: Decoder, part: MicroBatch | None, kv: Sequence[Planes]
) -> Generator[str, None, tuple[Tensor, Tensor] | None]:
    """Computes until something travels, says what it has computed, and goes on when it is asked again."""
    if part is None:
        nothing = model.norm.weight.new_empty(0, len(model.norm.weight))
        for layer in model.layers:
            assert isinstance(layer, Layer)
            if isinstance(layer.mlp, ExpertParallelMlp):
                yield from layer.mlp.stages(nothing, "nothing")
        return None
    batch = part.batch
    x_TH, rotations = model.embedded(batch), model.rotations(batch)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        x_TH = layer.attended(x_TH, rotations[index], batch, kv[index])
        given = layer.mlp_norm(x_TH)
        if isinstance(layer.mlp, ExpertParallelMlp):
            made = yield from layer.mlp.stages(given, "attention")
        else:
            made = layer.mlp(given)
        x_TH = x_TH + layer.mlp_post_norm(made)
    return part.rows, model.norm(x_TH)


def overlap_pays(whole: Sequence[Sequence[float]], overlapped: Sequence[Sequence[float]]) -> bool:
    """True if steps in halves have a shorter median, by LEAST_GAIN, in every run: seconds of steps, run by run."""
    return all(
        statistics.median(halved) <= (1 - LEAST_GAIN) * statistics.median(steps)
        for steps, halved in zip(whole, overlapped, strict=True)
    )
