"""Rows so few that all heads go through the keys together have the bits of a long prompt's, whatever the shape."""

from __future__ import annotations

import pytest
import torch

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from tests.serving.kernels.cpu.test_attention import decoder_with

LENGTH = 310  # two chunks of keys and some of a third
# heads, KV heads, head_dim, tokens of a block, new tokens: what a tile, a panel or a block holds, and what it does not
SHAPES = [
    (9, 3, 64, 16, 1),
    (9, 3, 64, 16, 4),  # a tile of rows
    (9, 3, 64, 16, 5),  # more
    (4, 1, 128, 32, 1),
    (32, 8, 64, 16, 1),
    (32, 8, 64, 16, 2),  # as many rows as there is room for
    (32, 8, 64, 16, 3),  # more
    (12, 2, 96, 24, 1),
    (14, 2, 32, 4, 1),
    (2, 2, 32, 1, 2),
    (2, 1, 64, 16, 1),  # two panels at a time
    (2, 2, 64, 16, 2),
    (5, 1, 64, 16, 1),  # a tile of rows where one has five
    (2, 2, 96, 16, 5),
    (80, 16, 64, 16, 1),  # and more of all heads than there is room for
]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "new"), SHAPES)
@pytest.mark.parametrize("company", [0, 7])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8])
def test_few_rows_have_the_bits_of_many(
    kernels: cpu.Kernels,
    kind: Kind,
    company: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    new: int,
    window: int,
) -> None:
    blocks = -(-LENGTH // block_size)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": head_dim}
    size = {"block_size": block_size, "blocks": 9 * blocks}
    _, decoder = decoder_with(kernels, kind, window=window, **shape, **size)
    order = torch.randperm(9 * blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[i * blocks : (i + 1) * blocks] for i in range(9)]

    def batch(starts: list[int], counts: list[int]) -> RaggedBatch:
        tokens = [[0] * count for count in counts]
        used = tables[: len(starts)]
        return RaggedBatch.build(tokens=tokens, starts=starts, block_tables=used, block_size=block_size)

    q = torch.randn(LENGTH, heads, head_dim)
    whole = decoder.attention(0, batch([0], [LENGTH]), q)
    for start in (0, 14, 16, 31, 32, 126, 127, 128, 255, LENGTH - new):
        beside = torch.randn(company, heads, head_dim)
        rows = torch.cat([q[start : start + new], beside])
        few = decoder.attention(0, batch([start] + [200 + i for i in range(company)], [new] + [1] * company), rows)
        assert torch.equal(few[:new], whole[start : start + new]), start


@pytest.mark.parametrize("at", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8])
def test_a_key_past_the_end_is_never_read(kernels: cpu.Kernels, kind: Kind, at: str) -> None:
    """Its row in the last block may hold anything."""
    context = {"first": 1, "middle": 143, "last": 287}[at]
    small, decoder = decoder_with(kernels, kind, heads=9, kv_heads=3, head_dim=64, rotary_dim=64)
    batch = RaggedBatch.build(tokens=[[0]], starts=[context - 1], block_tables=[list(range(18))], block_size=16)
    q = torch.randn(1, 9, 64)
    before = decoder.attention(0, batch, q)
    planes = small.planes[0]
    for plane in (planes.k, planes.v) if kind is Kind.BF16 else (planes.k_scale, planes.v_scale):
        assert plane is not None
        plane.view(-1, 3, *plane.shape[3:])[context:] = torch.nan
    assert before.isfinite().all() and torch.equal(decoder.attention(0, batch, q), before)


@pytest.mark.parametrize("context", [301, 302])
def test_an_infinite_value_is_the_same_alone_and_in_company(kernels: cpu.Kernels, context: int) -> None:
    """Keys come in pairs: the last of an odd number is no partner of its own, which times 0 would be no number."""
    small, decoder = decoder_with(kernels, Kind.BF16, heads=9, kv_heads=3, head_dim=64, rotary_dim=64)
    small.planes[0].v.view(-1, 3, 64)[context - 1] = torch.inf
    q = torch.randn(1, 9, 64)

    def first_of(company: int) -> torch.Tensor:
        tables = [list(range(20))] * (company + 1)
        starts = [context - 1] + [70] * company
        batch = RaggedBatch.build(tokens=[[0]] * len(starts), starts=starts, block_tables=tables, block_size=16)
        return decoder.attention(0, batch, torch.cat([q, torch.zeros(company, 9, 64)]))[0]

    assert torch.isposinf(first_of(0)).all() and torch.equal(first_of(0), first_of(20))
