"""Rotary embedding, KV writes and paged attention against plain formulas, and the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from tests.serving.kernels.cpu.formulas import SmallDecoder, attention, planes_for, ragged, rms_norm, rotate, stored

BATCHES = {
    "decode": [(0, 1), (16, 1), (300, 1), (129, 1), (511, 1)],
    "one long decode": [(700, 1)],
    "prefill": [(0, 5), (0, 130)],
    "after a cached prefix": [(128, 40), (37, 3), (255, 70)],
    "mixed": [(300, 1), (0, 33), (64, 64), (7, 1)],
}
TOLERANCE = {Kind.F32: 1e-5, Kind.BF16: 2e-2, Kind.INT8: 2e-2}  # weights are rounded to bfloat16 but for float32 KV


def decoder_with(kernels: cpu.Kernels, kv_kind: Kind, **shape: int) -> tuple[SmallDecoder, cpu.CpuDecoder]:
    """A one-layer decoder over planes full of random KV."""
    window = shape.pop("window", 0)
    small = SmallDecoder(kind=Kind.F32, kv_kind=kv_kind, layers=1, windows=(window,), **shape)
    planes = planes_for(kv_kind, small.blocks, small.block_size, small.kv_heads, small.head_dim, filled=True)
    small.planes = [planes]
    return small, small.build(kernels)


def queries(batch: RaggedBatch, small: SmallDecoder) -> torch.Tensor:
    return torch.randn(batch.tokens.shape[0], small.heads, small.head_dim).bfloat16().float()


@pytest.mark.parametrize("spans", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize("kv_kind", list(Kind))
def test_attention_equals_plain_softmax(kernels: cpu.Kernels, kv_kind: Kind, spans: list[tuple[int, int]]) -> None:
    small, decoder = decoder_with(kernels, kv_kind)
    batch = ragged(spans)
    q = queries(batch, small)
    expected = attention(q, small.planes[0], batch, small.head_dim**-0.5)
    torch.testing.assert_close(decoder.attention(0, batch, q), expected, rtol=0, atol=TOLERANCE[kv_kind])


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("kv_kind", list(Kind))
def test_head_sizes(kernels: cpu.Kernels, kv_kind: Kind, head_dim: int) -> None:
    small, decoder = decoder_with(kernels, kv_kind, head_dim=head_dim, rotary_dim=head_dim, heads=4, kv_heads=4)
    batch = ragged([(140, 3), (5, 1)])
    q = queries(batch, small)
    expected = attention(q, small.planes[0], batch, head_dim**-0.5)
    torch.testing.assert_close(decoder.attention(0, batch, q), expected, rtol=0, atol=TOLERANCE[kv_kind])


@pytest.mark.parametrize("window", [1, 40, 128, 200])
@pytest.mark.parametrize("spans", [[(400, 1)], [(390, 30), (10, 5)], [(0, 300)]], ids=["decode", "chunk", "prompt"])
def test_sliding_window(kernels: cpu.Kernels, window: int, spans: list[tuple[int, int]]) -> None:
    small, decoder = decoder_with(kernels, Kind.F32, window=window)
    batch = ragged(spans)
    q = queries(batch, small)
    expected = attention(q, small.planes[0], batch, small.head_dim**-0.5, window)
    torch.testing.assert_close(decoder.attention(0, batch, q), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("loud", [0, 1, 2], ids=["first chunk", "middle", "last"])
def test_scores_far_apart_do_not_overflow(kernels: cpu.Kernels, loud: int) -> None:
    small, decoder = decoder_with(kernels, Kind.F32)
    batch = ragged([(299, 1)])
    slots = batch.block_tables[0].long().repeat_interleave(16) * 16 + torch.arange(16).repeat(
        len(batch.block_tables[0])
    )
    small.planes[0].k.view(-1, small.kv_heads, small.head_dim)[slots[128 * loud : 128 * loud + 128]] *= 200
    q = queries(batch, small)
    expected = attention(q, small.planes[0], batch, small.head_dim**-0.5)
    torch.testing.assert_close(decoder.attention(0, batch, q), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kv_kind", list(Kind))
def test_a_token_has_the_same_bits_in_prefill_and_alone(kernels: cpu.Kernels, kv_kind: Kind) -> None:
    small, decoder = decoder_with(kernels, kv_kind)
    table = list(range(1, 41))
    tokens = 600

    def rows(start: int, new: int, beside: int = 0) -> RaggedBatch:
        tables = [table] + [list(range(50 + 5 * i, 55 + 5 * i)) for i in range(beside)]
        return RaggedBatch.build(
            tokens=[[0] * new] + [[0]] * beside, starts=[start] + [70] * beside, block_tables=tables, block_size=16
        )

    q = torch.randn(tokens, small.heads, small.head_dim)
    whole = decoder.attention(0, rows(0, tokens), q)
    for position in (0, 1, 63, 127, 128, 300, 599):
        one = q[position : position + 1]
        assert torch.equal(decoder.attention(0, rows(position, 1), one)[0], whole[position])
        company = torch.cat([one, torch.randn(15, small.heads, small.head_dim)])
        assert torch.equal(decoder.attention(0, rows(position, 1, beside=15), company)[0], whole[position])
    assert torch.equal(decoder.attention(0, rows(100, 60), q[100:160]), whole[100:160])


def test_values_past_the_end_are_never_read(kernels: cpu.Kernels) -> None:
    small, decoder = decoder_with(kernels, Kind.BF16)
    batch = ragged([(20, 1), (100, 3)])
    q = queries(batch, small)
    before = decoder.attention(0, batch, q)
    live = torch.zeros(small.blocks * small.block_size, dtype=torch.bool)
    for b, context in enumerate(batch.context_lens_list):
        keys = torch.arange(context)
        live[batch.block_tables[b][keys // 16].long() * 16 + keys % 16] = True
    for plane in (small.planes[0].k, small.planes[0].v):
        plane.view(-1, *plane.shape[2:])[~live] = torch.nan
    assert torch.equal(decoder.attention(0, batch, q), before)


@pytest.mark.parametrize("kv_kind", list(Kind))
@pytest.mark.parametrize("head_norms", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize("rotary_dim", [32, 12])
def test_rotate_and_write(kernels: cpu.Kernels, kv_kind: Kind, head_norms: bool, rotary_dim: int) -> None:
    small = SmallDecoder(kind=Kind.F32, kv_kind=kv_kind, rotary_dim=rotary_dim, head_norms=head_norms)
    decoder, batch = small.build(kernels), ragged([(3, 4), (200, 1), (0, 17)])
    qkv = torch.randn(22, small.heads + 2 * small.kv_heads, small.head_dim)
    rounded = decoder.rotate_and_write(1, batch, qkv.flatten(1))
    q, k, v = qkv.split([small.heads, small.kv_heads, small.kv_heads], dim=1)
    if head_norms:
        q, k = rms_norm(q, small.norms[1]["q_norm"], 1e-5), rms_norm(k, small.norms[1]["k_norm"], 1e-5)
    cos, sin = small.cos[batch.positions], small.sin[batch.positions]
    step = {Kind.F32: 1e-5, Kind.BF16: 2e-2, Kind.INT8: 3e-2}[kv_kind]
    torch.testing.assert_close(rounded, rotate(q, cos, sin), rtol=step, atol=step)
    torch.testing.assert_close(stored(small.planes[1], "k")[batch.slots], rotate(k, cos, sin), rtol=step, atol=step)
    torch.testing.assert_close(stored(small.planes[1], "v")[batch.slots], v, rtol=step, atol=step)
    assert not stored(small.planes[0], "k").any()
