"""The reference kernels against the textbook: one query and one head at a time, in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.kernels import reference
from serving.model.decoder import ACTIVATIONS

HEAD_DIM = 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For tensors this small, handing work to a second thread costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Pool:
    """Keys and values of some sequences, dense and in pages; whatever holds no token is NaN."""

    def __init__(
        self, contexts: list[int], block_size: int, kv_heads: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.dense = [torch.randn(2, n, kv_heads, HEAD_DIM, generator=generator).to(dtype) for n in contexts]
        counts = [-(-n // block_size) for n in contexts]
        ids = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        # Blocks of one tensor that holds keys and values side by side: planes need not be contiguous.
        pages = torch.full((sum(counts) + 3, 2, block_size, kv_heads, HEAD_DIM), torch.nan, dtype=dtype)
        self.planes = (pages[:, 0], pages[:, 1])

    def write(self, batch: RaggedBatch, starts: list[int]) -> None:
        new = [
            dense[:, start : start + n] for dense, start, n in zip(self.dense, starts, batch.query_lens, strict=True)
        ]
        k, v = torch.cat(new, dim=1)
        kernels.write_kv(k, v, self.planes, batch.slots)

    def batch(self, starts: list[int], counts: list[int]) -> RaggedBatch:
        tokens = [[0] * count for count in counts]
        return RaggedBatch.build(tokens=tokens, starts=starts, block_tables=self.tables, block_size=self.block_size)


def textbook_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, beside: float) -> Tensor:
    """query [D], keys and values [L, D] → [D]; `beside` joins the sum that weights are divided by."""
    scores = (scale * keys.double() @ query.double()).exp()
    return scores @ values.double() / (scores.sum() + beside)


def expected(
    pool: Pool,
    q: Tensor,
    starts: list[int],
    counts: list[int],
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    rows = []
    row = 0
    for dense, start, count in zip(pool.dense, starts, counts, strict=True):
        keys, values = dense
        for position in range(start, start + count):
            first = 0 if window is None else max(position - window + 1, 0)
            group = q.shape[1] // keys.shape[1]
            rows.append(
                torch.stack(
                    [
                        textbook_attention(
                            q[row, head],
                            keys[first : position + 1, head // group],
                            values[first : position + 1, head // group],
                            scale,
                            0.0 if sinks is None else float(sinks[head].double().exp()),
                        )
                        for head in range(q.shape[1])
                    ]
                )
            )
            row += 1
    return torch.stack(rows)


ragged = st.lists(st.tuples(st.integers(0, 24), st.sampled_from([1, 1, 2, 5, 9])), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(
    sequences=ragged,
    block_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3, 10]),
    query_block=st.sampled_from([2, 256]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_paged_attention_is_the_textbook_s(
    sequences: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    group: int,
    window: int | None,
    query_block: int,
    with_sinks: bool,
    seed: int,
) -> None:
    starts, counts = [start for start, _ in sequences], [count for _, count in sequences]
    pool = Pool([start + count for start, count in sequences], block_size, kv_heads, seed)
    pool.write(pool.batch([0] * len(starts), starts), [0] * len(starts))
    batch = pool.batch(starts, counts)
    pool.write(batch, starts)
    q = torch.randn(sum(counts), kv_heads * group, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    sinks = torch.linspace(-2, 2, q.shape[1]) if with_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "QUERY_BLOCK", query_block)
        found = kernels.paged_attention(q, pool.planes, batch, 0.4, window, sinks)
    truth = expected(pool, q, starts, counts, 0.4, window, sinks)
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=1e-5)


def test_planes_of_lower_precision_are_read_as_they_are() -> None:
    """Queries of bfloat16 over bfloat16 pages differ from float64 by the rounding of the result alone."""
    starts, counts = [30, 11], [7, 1]
    pool = Pool([37, 12], 4, 2, seed=5, dtype=torch.bfloat16)
    pool.write(pool.batch([0, 0], [37, 12]), [0, 0])
    q = torch.randn(8, 4, HEAD_DIM, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = kernels.paged_attention(q, pool.planes, pool.batch(starts, counts), 0.4, None)
    assert found.dtype == torch.bfloat16
    truth = expected(pool, q, starts, counts, 0.4, None)
    torch.testing.assert_close(found.double(), truth, atol=0.0, rtol=2**-8)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("threads", "rows", "width"),
    [(1, 40, 20), (1, 40, 50), (1, 40, 96), (2, 67, 1000), (3, 19, 4096), (5, 34, 3072)],
)
def test_a_row_s_activations_do_not_depend_on_others(
    kind: str, dtype: torch.dtype, threads: int, rows: int, width: int
) -> None:
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(9)) * 3).to(dtype)
    torch.set_num_threads(threads)
    try:
        whole = ACTIVATIONS[kind](x)
        assert whole.shape == x.shape and whole.is_contiguous()
        assert all(torch.equal(ACTIVATIONS[kind](x[:some]), whole[:some]) for some in range(1, rows))
        apart = torch.cat([x, x], -1)[:, :width]
        assert torch.equal(ACTIVATIONS[kind](apart), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("width", [20, 48, 64])
def test_a_row_s_gated_products_do_not_depend_on_how_many_there_are(width: int) -> None:
    x = torch.randn(40, 2 * width, generator=torch.Generator().manual_seed(9)) * 3
    for product in (kernels.silu_mul, kernels.gelu_tanh_mul, partial(kernels.clamped_swiglu, alpha=1.702, limit=2.0)):
        whole = product(x)
        assert all(torch.equal(product(x[:rows]), whole[:rows]) for rows in range(1, 40))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("rows", "width"), [(20, 1000), (67, 1000), (101, 1000), (333, 351), (3, 20_001)])
def test_a_row_s_gated_products_do_not_depend_on_where_threads_divide_them(threads: int, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(9)) * 3
    torch.set_num_threads(threads)
    try:
        for product in (kernels.silu_mul, kernels.gelu_tanh_mul, partial(kernels.clamped_swiglu, alpha=1.7, limit=7.0)):
            assert torch.equal(product(x), torch.cat([product(row) for row in x.split(1)]))
    finally:
        torch.set_num_threads(1)


def test_clamped_swiglu_is_the_published_formula() -> None:
    gate, up = torch.tensor([[-9.0, -1.0, 0.5, 9.0]]), torch.tensor([[9.0, -9.0, 0.5, -1.0]])
    found = kernels.clamped_swiglu(torch.cat([gate, up], -1), 1.702, 7.0)[0].tolist()
    pairs = [(-9.0, 7.0), (-1.0, -7.0), (0.5, 0.5), (7.0, -1.0)]
    assert found == pytest.approx([(u + 1) * g / (1 + math.exp(-1.702 * g)) for g, u in pairs])


def test_write_kv_touches_its_slots_only() -> None:
    pool = Pool([6, 3], 4, 2, seed=1)
    pool.write(pool.batch([0, 0], [6, 3]), [0, 0])
    for plane, which in zip(pool.planes, (0, 1), strict=True):
        for table, dense in zip(pool.tables, pool.dense, strict=True):
            assert torch.equal(plane[table].flatten(0, 1)[: dense.shape[1]], dense[which])
        assert int((~plane.isnan()).sum()) == 9 * 2 * HEAD_DIM


def test_rms_norm_is_computed_in_float32() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(64) + 0.5
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), truth, atol=1e-6, rtol=1e-6)
    rounded = x.bfloat16()
    truth = rounded.double() / (rounded.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = kernels.rms_norm(rounded, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), truth, atol=0, rtol=2**-8)


def test_layer_norm() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.rand(64) + 0.5, torch.randn(64)
    wide = x.double()
    spread = (wide.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    truth = (wide - wide.mean(-1, keepdim=True)) / spread * weight.double() + bias.double()
    torch.testing.assert_close(kernels.layer_norm(x, weight, bias, 1e-5).double(), truth, atol=1e-5, rtol=1e-5)


def test_rope_turns_pairs_and_keeps_the_rest() -> None:
    """Each pair (p, P + p) is a complex number times e^(i angle); dimensions from 2P on pass."""
    q, k = torch.randn(5, 3, 10), torch.randn(5, 2, 10)
    angles = torch.randn(5, 4)
    for given_, turned in zip((q, k), kernels.rope(q, k, angles.cos(), angles.sin()), strict=True):
        before = torch.complex(given_[..., :4], given_[..., 4:8])
        after = before * torch.polar(torch.ones(5, 4), angles)[:, None]
        torch.testing.assert_close(turned[..., :4], after.real)
        torch.testing.assert_close(turned[..., 4:8], after.imag)
        assert torch.equal(turned[..., 8:], given_[..., 8:])


def test_activations() -> None:
    x = torch.linspace(-4, 4, 33)[None]
    wide = x.double()
    torch.testing.assert_close(
        ACTIVATIONS["gelu"](x).double(), wide / 2 * (1 + torch.erf(wide / 2**0.5)), atol=1e-6, rtol=1e-6
    )
    inner = (2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    by_tanh = ACTIVATIONS["gelu_tanh"](x).double()
    torch.testing.assert_close(by_tanh, wide / 2 * (1 + inner.tanh()), atol=1e-6, rtol=1e-6)
    assert torch.equal(ACTIVATIONS["relu"](x), x.clamp(min=0))
    assert ACTIVATIONS["gelu"] is kernels.gelu, "only some CPUs show whether torch's is"
    assert kernels.gelu(torch.empty(0, 33)).shape == (0, 33)
    up = torch.randn(1, 33)
    truth = wide / (1 + (-wide).exp()) * up.double()
    found = kernels.silu_mul(torch.cat([x, up], -1))
    torch.testing.assert_close(found.double(), truth, atol=1e-6, rtol=1e-6)
