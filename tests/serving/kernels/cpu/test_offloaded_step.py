"""A step over KV in segments has, bit for bit, the logits of a step over all of it, and writes the same KV."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from serving.kernels.cpu.offloaded_step import offloaded_step
from tests.serving.kernels.cpu.formulas import SmallDecoder
from tests.serving.kernels.segments import CopiedSegments

KINDS = [(Kind.F32, Kind.F32), (Kind.BF16, Kind.BF16), (Kind.INT8, Kind.BF16), (Kind.INT8, Kind.INT8)]
TOKENS = [(13 * i * i + 5) % 100 for i in range(700)]
TABLE = [(7 * i) % 50 for i in range(44)]


def layers_of(small: SmallDecoder) -> list[tuple[Tensor, ...]]:
    parts = [(one.k, one.v, one.k_scale, one.v_scale) for one in small.planes]
    return [tuple(plane for plane in layer if plane is not None) for layer in parts]


def written(small: SmallDecoder) -> list[Tensor]:
    return [plane.clone() for layer in layers_of(small) for plane in layer]


def batch_of(start: int, new: int, offloaded: CopiedSegments | None = None) -> RaggedBatch:
    first = 0 if offloaded is None else offloaded.tokens // 16
    return RaggedBatch.build(
        tokens=[TOKENS[start : start + new]],
        starts=[start],
        block_tables=[TABLE[first:]],
        block_size=16,
        logits_rows=[0, new - 1] if new > 1 else [0],
        offloaded=offloaded,
    )


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: f"{kinds[0].name}-{kinds[1].name}")
@pytest.mark.parametrize("windows", [(0, 0), (150, 0)], ids=["all", "window"])
def test_the_bits_are_those_of_all_kv_at_once(
    kernels: cpu.Kernels, kinds: tuple[Kind, Kind], windows: tuple[int, int]
) -> None:
    extra = {"head_norms": True, "bias": True, "rotary_dim": 16} if windows[0] else {}
    small = SmallDecoder(kind=kinds[0], kv_kind=kinds[1], windows=windows, **extra)  # type: ignore[arg-type]
    decoder = small.build(kernels)
    decoder.step(batch_of(0, 520))
    for start, new, moved, each in ((520, 1, 384, 256), (520, 70, 512, 128), (590, 5, 128, 128), (595, 1, 512, 512)):
        before = written(small)
        expected = decoder.step(batch_of(start, new))
        after = written(small)
        for plane, old in zip([plane for layer in layers_of(small) for plane in layer], before, strict=True):
            plane.copy_(old)
        seen = [window or None for window in windows]
        offloaded = CopiedSegments(layers_of(small), TABLE, moved, each, start=start, windows=seen)
        told: list[bool] = []

        def layer_done(layer: int, wanted: list[Tensor] = after, told: list[bool] = told) -> None:
            planes = layers_of(small)
            begin = sum(map(len, planes[:layer]))
            told.append(all(map(torch.equal, planes[layer], wanted[begin : begin + len(planes[layer])])))

        found = offloaded_step(decoder, batch_of(start, new, offloaded), layer_done)
        assert told == [True] * len(layers_of(small)), "each layer's KV is written when it is told"
        assert torch.equal(found, expected)
        assert all(map(torch.equal, written(small), after))
        again = CopiedSegments(layers_of(small), TABLE, moved, each, start=start, windows=seen)
        hidden = offloaded_step(decoder, batch_of(start, new, again), output=cpu.StepOutput.HIDDEN)
        assert torch.equal(hidden, decoder.step(batch_of(start, new), cpu.StepOutput.HIDDEN))


def test_no_logits_when_none_are_wanted_and_no_positions_past_the_table(kernels: cpu.Kernels) -> None:
    small = SmallDecoder(kind=Kind.F32, kv_kind=Kind.F32, positions=600)
    decoder = small.build(kernels)
    layers = [(one.k, one.v) for one in small.planes]

    def rows(start: int) -> RaggedBatch:
        return RaggedBatch.build(
            tokens=[TOKENS[start : start + 3]],
            starts=[start],
            block_tables=[TABLE[8:]],
            block_size=16,
            logits_rows=[],
            offloaded=CopiedSegments(layers, TABLE, 128, 128),
        )

    assert offloaded_step(decoder, rows(200)).shape == (0, small.vocab)
    with pytest.raises(ValueError, match="rotary table"):
        offloaded_step(decoder, rows(598))
