"""Attention over KV that passes through the device in segments, against the reference over all of it at once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.kernels import gpu
from serving.kernels.gpu import offloaded_attention
from serving.kernels.int8 import quantize_rows
from tests.serving.kernels.gpu.formulas import CLOSE, error
from tests.serving.kernels.segments import CopiedSegments

SIZE, HEADS, KV_HEADS, DIM, BLOCKS, OFFLOADED = 16, 6, 2, 16, 30, 256
SCALE = 0.2


def planes_of(kind: str, device: torch.device) -> tuple[Tensor, ...]:
    k, v = torch.randn(2, BLOCKS, SIZE, KV_HEADS, DIM, device=device)
    if kind == "int8":
        (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
        return k, v, k_scale, v_scale
    kept = getattr(torch, kind)
    return k.to(kept), v.to(kept)


def attend(
    kind: str, window: int | None, start: int, new: int, each: int, device: torch.device, gain: float = 1.0
) -> float:
    """The error against the reference; blocks of what is offloaded are full of NaN, or nonsense, on the device."""
    table = random.Random(1).sample(range(BLOCKS), -(-(start + new) // SIZE))
    planes = planes_of(kind, device)
    dtype = torch.float32 if kind == "int8" else planes[0].dtype
    q = (gain * torch.randn(new, HEADS, DIM, device=device)).to(dtype)
    whole = RaggedBatch.build(tokens=[[0] * new], starts=[start], block_tables=[table], block_size=SIZE, device=device)
    expected = kernels.paged_attention(q, planes, whole, SCALE, window)
    copied = [plane.clone() for plane in planes]
    for plane in planes:
        plane[table[: OFFLOADED // SIZE]] = torch.nan if plane.is_floating_point() else -77
    batch = RaggedBatch.build(
        tokens=[[0] * new],
        starts=[start],
        block_tables=[table[OFFLOADED // SIZE :]],
        block_size=SIZE,
        offloaded=CopiedSegments([tuple(copied)], table, OFFLOADED, each, start=start, windows=[window]),
        device=device,
    )
    k, v, *scales = planes
    return error(gpu.paged_attention(q, k, v, batch, SCALE, window, *scales), expected)


DECODE, CHUNK, SHORT = (300, 1), (290, 24), (256, 5)


@pytest.mark.parametrize(
    ("step", "kind", "window", "each"),
    [
        (DECODE, "float32", None, 128),
        (DECODE, "int8", None, 256),
        (DECODE, "float32", 1, 128),
        (DECODE, "float32", 150, 256),
        (CHUNK, "float32", None, 256),
        (CHUNK, "int8", 100, 128),
        (CHUNK, "float32", 200, 128),
        (SHORT, "int8", None, 256),
        (SHORT, "float32", 100, 128),
    ],
)
def test_pieces_add_up(step: tuple[int, int], kind: str, window: int | None, each: int, device: torch.device) -> None:
    assert attend(kind, window, *step, each, device) < CLOSE[torch.float32]


@pytest.mark.parametrize("new", [1, 22])
def test_bfloat16(new: int, device: torch.device) -> None:
    assert attend("bfloat16", None, 290, new, 256, device) < CLOSE[torch.bfloat16]


def test_a_query_that_has_seen_nothing_yet_takes_no_harm(device: torch.device) -> None:
    """Segments may lie before the window of the chunk's later tokens, and scores may be huge."""
    assert attend("float32", 20, 256, 40, 128, device, gain=1e4) < 1e-4


@pytest.mark.parametrize(("new", "window"), [(1, None), (1, 200), (22, 150)])
def test_splits_of_a_segment_are_joined(
    new: int, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded_attention, "SHORTEST", 64)
    assert attend("float32", window, 280, new, 256, device) < CLOSE[torch.float32]
