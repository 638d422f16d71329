"""Steps of prompts and decodes together, cut by rows: threads share out decodes' attention before the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from tests.serving.kernels.cpu.formulas import SmallDecoder

WIDTH = 40  # blocks of a sequence
KINDS = [(Kind.F32, Kind.F32), (Kind.INT8, Kind.BF16), (Kind.BF16, Kind.INT8)]

# Tokens in KV, and new ones. Two KV heads: sequences of up to 32 new tokens are planned.
ONE_LONG = [(530, 1), (0, 200), (200, 2)]  # chunks of what is planned are shared out one by one
LENGTHS = [(3, 33), (100, 32), (7, 1), (0, 31), (290, 5), (40, 90)]
MANY = [(20 * i + 5, 1 + i % 4) for i in range(12)]


def made(kernels: cpu.Kernels, kinds: tuple[Kind, Kind], windows: tuple[int, ...] | None) -> SmallDecoder:
    extra = {} if windows is None else {"windows": windows}
    return SmallDecoder(kind=kinds[0], kv_kind=kinds[1], blocks=WIDTH * 16, positions=WIDTH * 16, **extra)  # type: ignore[arg-type]


def tokens_of(sequence: int, count: int) -> list[int]:
    return [(13 * i + 29 * sequence + i // 70) % 100 for i in range(count)]


def batch_of(pieces: Sequence[tuple[int, int, int]]) -> RaggedBatch:
    """Each of `pieces` is a sequence by number, where it begins, and how many new tokens; all their logits are kept."""
    return RaggedBatch.build(
        tokens=[tokens_of(number, start + new)[start:] for number, start, new in pieces],
        starts=[start for _, start, _ in pieces],
        block_tables=[list(range(number * WIDTH, (number + 1) * WIDTH)) for number, _, _ in pieces],
        block_size=16,
        logits_rows=range(sum(new for _, _, new in pieces)),
    )


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
@pytest.mark.parametrize("windows", [None, (20, 0), (150, 150)])
@pytest.mark.parametrize(
    "lengths",
    [ONE_LONG, LENGTHS, LENGTHS[::-1], [(0, 200), *MANY], [*MANY, (60, 200)], [*MANY[:6], (0, 64), *MANY[6:]]],
    ids=["one long", "lengths", "reversed", "prompt first", "prompt last", "prompt between"],
)
def test_each_sequence_has_the_bits_that_it_has_alone(
    kernels: cpu.Kernels, kinds: tuple[Kind, Kind], windows: tuple[int, ...] | None, lengths: list[tuple[int, int]]
) -> None:
    small = made(kernels, kinds, windows)
    decoder = small.build(kernels)
    alone: list[Tensor] = []
    for number, (start, new) in enumerate(lengths):
        for at in range(0, start, 50):  # by panels
            decoder.step(batch_of([(number, at, min(50, start - at))]))
        alone += [decoder.step(batch_of([(number, at, 1)])).clone() for at in range(start, start + new)]
    written = [plane.clone() for one in small.planes for plane in (one.k, one.v)]
    pieces = [(number, start, new) for number, (start, new) in enumerate(lengths)]
    for _ in range(2):  # the second time scratch holds what the first has left
        assert torch.equal(decoder.step(batch_of(pieces)), torch.cat(alone))
    planes = [plane for one in small.planes for plane in (one.k, one.v)]
    assert all(torch.equal(plane, kept) for plane, kept in zip(planes, written, strict=True))


def test_only_rows_whose_logits_are_wanted_leave_the_last_layer(kernels: cpu.Kernels) -> None:
    small = made(kernels, KINDS[1], None)
    decoder = small.build(kernels)
    pieces = [(number, start, new) for number, (start, new) in enumerate([(0, 40), (200, 1), (100, 30), (0, 150)])]
    for number, start, _ in pieces:
        if start:
            decoder.step(batch_of([(number, 0, start)]))
    every = decoder.step(batch_of(pieces)).clone()
    for rows in ([40], [70], [39, 220], [0, 40, 41, 220]):
        batch = RaggedBatch.build(
            tokens=[tokens_of(number, start + new)[start:] for number, start, new in pieces],
            starts=[start for _, start, _ in pieces],
            block_tables=[list(range(number * WIDTH, (number + 1) * WIDTH)) for number, _, _ in pieces],
            block_size=16,
            logits_rows=rows,
        )
        assert torch.equal(decoder.step(batch), every[rows])
