"""Attention over INT8 KV in heads of whole vectors, which AMX multiplies as it is (bytes.h) and other forms widen."""

from __future__ import annotations

import pytest
import torch

from serving.batch.ragged import RaggedBatch
from serving.kernels import cpu
from serving.kernels.cpu import Kind
from tests.serving.kernels.cpu.formulas import SmallDecoder, attention, ragged, stored
from tests.serving.kernels.cpu.test_attention import BATCHES, decoder_with

HEADS = [(9, 3, 64), (4, 1, 128), (20, 2, 64), (32, 8, 64), (2, 2, 192), (2, 1, 512)]  # heads, KV heads, head_dim
WIDENED = 2e-2  # weights of bfloat16
TWO_BYTES = 5e-4  # of 16 bits


def int8_decoder(
    kernels: cpu.Kernels, heads: int = 9, kv_heads: int = 3, head_dim: int = 64, window: int = 0
) -> tuple[SmallDecoder, cpu.CpuDecoder]:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": head_dim}
    return decoder_with(kernels, Kind.INT8, window=window, **shape)


def random_queries(batch: RaggedBatch, small: SmallDecoder) -> torch.Tensor:
    return torch.randn(batch.tokens.shape[0], small.heads, small.head_dim)


def tolerance(kernels: cpu.Kernels) -> float:
    return TWO_BYTES if kernels.form == "avx512_amx" else WIDENED


def slots_of(batch: RaggedBatch, sequence: int = 0) -> torch.Tensor:
    """Where the keys of a sequence lie, [context]."""
    keys = torch.arange(batch.context_lens_list[sequence])
    return batch.block_tables[sequence][keys // 16].long() * 16 + keys % 16


@pytest.mark.parametrize("window", [0, 40, 200])
@pytest.mark.parametrize("spans", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_attention_equals_plain_softmax(
    kernels: cpu.Kernels, heads: int, kv_heads: int, head_dim: int, spans: list[tuple[int, int]], window: int
) -> None:
    small, decoder = int8_decoder(kernels, heads, kv_heads, head_dim, window)
    batch = ragged(spans)
    q = random_queries(batch, small)
    expected = attention(q, small.planes[0], batch, head_dim**-0.5, window)
    torch.testing.assert_close(decoder.attention(0, batch, q), expected, rtol=0, atol=tolerance(kernels))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_a_token_has_the_same_bits_in_prefill_and_alone(
    kernels: cpu.Kernels, heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    small, decoder = int8_decoder(kernels, heads, kv_heads, head_dim, window)
    small.planes[0].v_scale.mul_(torch.rand_like(small.planes[0].v_scale).exp())  # what comes later may be larger
    table = list(range(1, 21))

    def rows(start: int, new: int) -> RaggedBatch:
        return RaggedBatch.build(tokens=[[0] * new], starts=[start], block_tables=[table], block_size=16)

    q = torch.randn(300, heads, head_dim)
    whole = decoder.attention(0, rows(0, 300), q)
    for position in (0, 1, 15, 16, 63, 64, 127, 128, 191, 192, 260, 299):
        assert torch.equal(decoder.attention(0, rows(position, 1), q[position : position + 1])[0], whole[position])
    for start, new in ((100, 60), (126, 4), (250, 9)):
        assert torch.equal(decoder.attention(0, rows(start, new), q[start : start + new]), whole[start : start + new])


def test_scales_past_the_end_are_never_read(kernels: cpu.Kernels) -> None:
    small, decoder = int8_decoder(kernels)
    batch = ragged([(20, 1), (100, 3), (130, 1), (0, 70)])
    q = random_queries(batch, small)
    before = decoder.attention(0, batch, q)
    live = torch.zeros(small.blocks * small.block_size, dtype=torch.bool)
    for sequence in range(4):
        live[slots_of(batch, sequence)] = True
    for scale in (small.planes[0].k_scale, small.planes[0].v_scale):
        assert scale is not None
        scale.flatten(0, 1)[~live] = torch.nan
    assert torch.equal(decoder.attention(0, batch, q), before)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("plane", ["k_scale", "v_scale"])
@pytest.mark.parametrize("wrong", [torch.nan, -torch.nan, torch.inf, -torch.inf, -1.0])
@pytest.mark.parametrize("decodes", [False, True], ids=["prompt", "decodes"])
def test_what_sees_a_wrong_scale_has_no_result_and_all_else_its_own(
    kernels: cpu.Kernels, decodes: bool, wrong: float, plane: str, window: int
) -> None:
    if kernels.form != "avx512_amx":
        pytest.skip("forms that widen INT8 leave such keys out, or multiply later ones by 0, which gives NaN")
    small, decoder = int8_decoder(kernels, window=window)
    positions = list(range(40, 300, 7)) if decodes else list(range(300))
    starts, counts = (positions, [1] * len(positions)) if decodes else ([0], [300])
    tables = [list(range(1, 20))] * len(starts)
    batch = RaggedBatch.build(tokens=[[0] * n for n in counts], starts=starts, block_tables=tables, block_size=16)
    q = random_queries(batch, small)
    before = decoder.attention(0, batch, q)
    scales: torch.Tensor = getattr(small.planes[0], plane)
    scales.flatten(0, 1)[slots_of(batch)[0] + 150, 1] = wrong
    after = decoder.attention(0, batch, q)
    spoilt = torch.zeros(len(positions), small.heads, dtype=torch.bool)
    sees = torch.tensor([p >= 150 and (not window or p - window < 150) for p in positions])
    spoilt[:, 3:6] = sees[:, None]  # the query heads of KV head 1
    assert after[spoilt].isnan().all()
    assert torch.equal(after[~spoilt], before[~spoilt])


@pytest.mark.parametrize("spans", [[(200, 1)] * 4, [(0, 200)]], ids=["decodes", "prompt"])
@pytest.mark.parametrize(("loud", "weight"), [(1e4, 0.0), (0.1, 0.9), (0.01, 0.99), (1.0, 0.9)])
def test_values_far_apart_err_by_a_share_of_the_largest(
    kernels: cpu.Kernels, spans: list[tuple[int, int]], loud: float, weight: float
) -> None:
    """A key of no weight whose value is large, and one that has nearly all the weight and a small value."""
    small, decoder = int8_decoder(kernels, heads=3, kv_heads=1)
    batch = RaggedBatch.build(
        tokens=[[0] * new for _, new in spans],
        starts=[start for start, _ in spans],
        block_tables=[list(range(1, 14))] * len(spans),
        block_size=16,
    )
    planes = small.planes[0]
    assert planes.k_scale is not None and planes.v_scale is not None
    planes.k.zero_()
    first = slots_of(batch)[0]
    planes.k.flatten(0, 1)[first, :, 0] = 127
    planes.k_scale.fill_(1 / 127)
    planes.v_scale.flatten(0, 1)[first] *= loud
    q = torch.zeros(batch.tokens.shape[0], 3, 64)
    others = (batch.positions + 0.0).clamp(min=1)  # keys that weigh alike
    q[:, :, 0] = 8 * (others * weight / (1 - weight)).log()[:, None] if weight else -400.0
    expected = attention(q, planes, batch, 64**-0.5)
    largest = 127 * float(planes.v_scale.flatten(0, 1)[slots_of(batch)].max())
    error = (decoder.attention(0, batch, q) - expected).abs().max()
    assert error < largest * (2e-4 if kernels.form == "avx512_amx" else WIDENED)


def test_rows_that_begin_within_a_word_are_refused(kernels: cpu.Kernels) -> None:
    k, v = (torch.zeros(4, 16, 2, 67, dtype=torch.int8)[..., :64] for _ in range(2))
    scale = torch.zeros(4, 16, 2)
    with pytest.raises(ValueError, match="67 bytes apart"):
        cpu.KvPlanes(k=k, v=v, k_scale=scale, v_scale=scale).as_c()


@pytest.mark.parametrize("wrong", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_query_that_is_no_number_spoils_itself(kernels: cpu.Kernels, wrong: float) -> None:
    small, decoder = int8_decoder(kernels)
    batch = ragged([(0, 40), (200, 1), (300, 1)])
    q = random_queries(batch, small)
    before = decoder.attention(0, batch, q)
    q[7, 4, 11] = q[40, 2, 63] = wrong
    after = decoder.attention(0, batch, q)
    spoilt = torch.zeros(42, small.heads, dtype=torch.bool)
    spoilt[7, 4] = spoilt[40, 2] = True
    assert after[spoilt].isnan().all()
    assert torch.equal(after[~spoilt], before[~spoilt])


@pytest.mark.parametrize("spans", [[(299, 1)], [(0, 200)]], ids=["decode", "prompt"])
def test_queries_of_nothing_see_all_keys_alike(kernels: cpu.Kernels, spans: list[tuple[int, int]]) -> None:
    small, decoder = int8_decoder(kernels)
    batch = ragged(spans)
    q = torch.zeros(batch.tokens.shape[0], small.heads, small.head_dim)
    q[:, 1::3] = 1e-42  # so small that the largest is no normal number
    mean = attention(q, small.planes[0], batch, 0.0)
    torch.testing.assert_close(decoder.attention(0, batch, q), mean, rtol=0, atol=tolerance(kernels))


@pytest.mark.parametrize("spans", [[(299, 1)], [(0, 200)]], ids=["decode", "prompt"])
def test_values_of_nothing_sum_to_nothing(kernels: cpu.Kernels, spans: list[tuple[int, int]]) -> None:
    small, decoder = int8_decoder(kernels)
    batch = ragged(spans)
    assert small.planes[0].v_scale is not None
    small.planes[0].v_scale.zero_()
    assert not decoder.attention(0, batch, random_queries(batch, small)).any()


@pytest.mark.parametrize("size", [1e3, 1e6])
@pytest.mark.parametrize("spans", [[(299, 1)], [(0, 200)]], ids=["decode", "prompt"])
def test_one_key_may_outweigh_all(kernels: cpu.Kernels, spans: list[tuple[int, int]], size: float) -> None:
    small, decoder = int8_decoder(kernels, heads=3)
    batch = ragged(spans)
    first = slots_of(batch)[0]
    small.planes[0].k.flatten(0, 1)[first] = 127
    q = torch.full((batch.tokens.shape[0], 3, 64), size)  # the sum of a key's numbers: no other's is near the first's
    expected = stored(small.planes[0], "v")[first].expand_as(q)
    torch.testing.assert_close(decoder.attention(0, batch, q), expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("loud", [0.25, 1.0, 77.0, 1e-30, 8191.4, 8191.6, 16383.4])
def test_decoded_queries_have_the_bits_of_those_of_a_step(kernels: cpu.Kernels, loud: float) -> None:
    """What `rotate_and_write` returns is what attention multiplies, and encoding it again changes nothing."""
    small = SmallDecoder(kind=Kind.F32, kv_kind=Kind.INT8, head_dim=64, rotary_dim=64, layers=1, windows=(0,))
    decoder, batch = small.build(kernels), ragged([(3, 4), (200, 1)])
    qkv = torch.randn(5, small.heads + 2 * small.kv_heads, 64)
    qkv[:, :, 0] = 0
    qkv[:, 0, 1:32], qkv[:, 0, 33:] = loud, 0  # a position turns it from full size on
    once = decoder.rotate_and_write(0, batch, qkv.flatten(1))
    again = torch.cat([once, qkv[:, small.heads :]], dim=1)
    flat = RaggedBatch.build(tokens=[[0]] * 5, starts=[0] * 5, block_tables=[[i] for i in range(5)], block_size=16)
    assert torch.equal(decoder.rotate_and_write(0, flat, again.flatten(1)), once)  # position 0 turns nothing
