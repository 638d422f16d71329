"""Attention over KV in segments, in plain torch, equals attention over all of it at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.kernels.int8 import quantize_rows
from tests.serving.kernels.segments import CopiedSegments

SIZE, HEADS, KV_HEADS, DIM = 16, 6, 2, 8


def planes_of(kind: str, blocks: int) -> tuple[Tensor, ...]:
    k, v = torch.randn(2, blocks, SIZE, KV_HEADS, DIM)
    if kind == "int8":
        (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
        return k, v, k_scale, v_scale
    return k, v


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize(("start", "new"), [(900, 1), (640, 300), (513, 40)], ids=["decode", "chunk", "short"])
@pytest.mark.parametrize(("each", "sink"), [(128, None), (384, None), (384, 5.0)])
def test_pieces_add_up(kind: str, window: int | None, start: int, new: int, each: int, sink: float | None) -> None:
    torch.manual_seed(0)
    table = random.Random(1).sample(range(80), 60)
    planes = planes_of(kind, 80)
    q = torch.randn(new, HEADS, DIM)
    whole = RaggedBatch.build(tokens=[[0] * new], starts=[start], block_tables=[table], block_size=SIZE)
    sinks = None if sink is None else torch.randn(HEADS) * sink
    expected = kernels.paged_attention(q, planes, whole, DIM**-0.5, window, sinks)
    offloaded = CopiedSegments([planes], table, 512, each, start=start, windows=[window])
    batch = RaggedBatch.build(
        tokens=[[0] * new], starts=[start], block_tables=[table[512 // SIZE :]], block_size=SIZE, offloaded=offloaded
    )
    assert torch.equal(batch.slots, whole.slots) and batch.context_lens_list == whole.context_lens_list
    found = kernels.paged_attention(q, planes, batch, DIM**-0.5, window, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, torch.zeros_like(found))


def test_a_query_that_has_seen_nothing_yet_takes_no_harm() -> None:
    """The first segment may lie before the window of the chunk's later tokens, and scores may be huge."""
    torch.manual_seed(0)
    k, v = planes_of("float32", 40)
    q = torch.randn(200, HEADS, DIM) * 1e4
    table = list(range(40))
    whole = RaggedBatch.build(tokens=[[0] * 200], starts=[128], block_tables=[table], block_size=SIZE)
    batch = replace(whole, offloaded=CopiedSegments([(k, v)], table, 128, 128), block_tables=whole.block_tables[:, 8:])
    expected = kernels.paged_attention(q, (k, v), whole, 1.0, 20)
    torch.testing.assert_close(kernels.paged_attention(q, (k, v), batch, 1.0, 20), expected, rtol=1e-4, atol=1e-4)
