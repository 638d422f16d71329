"""The quantized linear layer and the INT8 kernels, against formulas over Python integers and over float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving import kernels
from serving.batch.ragged import RaggedBatch
from serving.kernels import int8
from serving.kvspec import gqa_int8
from serving.model.quantized_linear import QuantizedLinear
from serving.model.spec import ModelSpec


def naive(x: list[float], weight: list[list[int]], scale: list[float], bias: list[float]) -> list[float]:
    """One row, one number at a time; the products are Python's integers."""
    largest = max(abs(value) for value in x)
    inverse = float(torch.tensor(127.0) / torch.tensor(largest)) if largest else 0.0
    values = [round(float(torch.tensor(value) * torch.tensor(inverse))) for value in x]
    return [
        sum(a * b for a, b in zip(values, row, strict=True)) * channel * largest / 127 + added
        for row, channel, added in zip(weight, scale, bias, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 5), inputs=st.integers(1, 70), outputs=st.integers(1, 40), seed=st.integers(0, 999))
def test_linear_is_the_naive_formula(rows: int, inputs: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
    scale, bias = torch.rand(outputs, generator=generator) + 0.1, torch.randn(outputs, generator=generator)
    found = QuantizedLinear(weight, scale, bias)(x)
    assert found.shape == (rows, outputs)
    for row, out in zip(x, found, strict=True):
        expected = naive(row.tolist(), weight.tolist(), scale.tolist(), bias.tolist())
        torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-5, atol=1e-5 * float(out.abs().max()))


def test_sums_do_not_saturate() -> None:
    """16,000 products of the largest numbers need 28 bits, more than a float32 holds."""
    ones = torch.full((1, 16001), 127, dtype=torch.int8)
    assert int(int8.integer_product(ones, ones)) == 127 * 127 * 16001


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 1), (3, 1024), (5, 1025), (9, 3000)])
def test_products_are_exact_with_and_without_vnni(
    vnni: bool, rows: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of one sign, so that sums are as large as they get: odd ones need every bit."""
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: vnni)
    generator = torch.Generator().manual_seed(inputs)
    a, b = (torch.randint(-128, -120, (count, inputs), dtype=torch.int8, generator=generator) for count in (rows, 7))
    assert torch.equal(int8.integer_product(a, b).long(), a.long() @ b.long().t())


def test_rows_of_zeros_and_leading_dimensions() -> None:
    layer = QuantizedLinear(torch.full((3, 4), 5, dtype=torch.int8), torch.ones(3))
    assert torch.equal(layer(torch.zeros(2, 5, 4)), torch.zeros(2, 5, 3))
    assert layer(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    layer = QuantizedLinear(torch.randint(-127, 128, (24, 40), dtype=torch.int8), torch.rand(24))
    x = torch.randn(9, 40)
    assert torch.equal(layer(x)[4], layer(x[4]))


def pools(blocks: int, spec: ModelSpec, dtype: str) -> tuple[Tensor, ...]:
    layer = spec.kv_layers(dtype)[0]
    return tuple(torch.zeros(blocks, 4, *plane.shape, dtype=getattr(torch, plane.dtype)) for plane in layer.planes)


SPEC = ModelSpec(
    architecture="llama",
    vocab_size=8,
    hidden=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=8,
    max_position=64,
    norm_eps=1e-5,
)


def test_planes_of_int8_kv() -> None:
    layer = SPEC.kv_layers("int8")[0]
    assert layer == gqa_int8(2, 16)
    assert [(plane.name, plane.shape, plane.dtype) for plane in layer.planes] == [
        ("k", (2, 16), "int8"),
        ("v", (2, 16), "int8"),
        ("k_scale", (2,), "float32"),
        ("v_scale", (2,), "float32"),
    ]
    assert layer.token_bytes == 2 * (2 * 16 + 2 * 4)


@pytest.mark.parametrize("window", [None, 6])
def test_int8_kv_stays_close_to_float(window: int | None) -> None:
    """Keys and values of very different sizes: each head of each token has its own scale, so all keep 8 bits."""
    torch.manual_seed(3)
    starts, counts, tables = [0, 9], [11, 1], [[5, 2, 7], [3, 0, 6]]
    earlier = RaggedBatch.build(tokens=[[0] * 9], starts=[0], block_tables=tables[1:], block_size=4)
    batch = RaggedBatch.build(
        tokens=[[0] * count for count in counts], starts=starts, block_tables=tables, block_size=4
    )
    outputs = []
    pair = pools(8, SPEC, "float32"), pools(8, SPEC, "int8")
    size = torch.logspace(-1, 1, 12)[:, None, None] * torch.tensor([1.0, 5.0])[:, None]
    k, v = torch.randn(2, 12, 2, 16) * size
    old_k, old_v = torch.randn(2, 9, 2, 16)
    q = torch.randn(12, 4, 16) * 0.3
    for planes in pair:
        kernels.write_kv(old_k, old_v, planes, earlier.slots)
        kernels.write_kv(k, v, planes, batch.slots)
        outputs.append(kernels.paged_attention(q, planes, batch, 0.25, window))
    exact, found = outputs
    assert float((found - exact).norm() / exact.norm()) < 0.02
    assert not torch.equal(found, exact)
    flat = pair[1][0].flatten(0, 1)[batch.slots].float() * pair[1][2].flatten(0, 1)[batch.slots][..., None]
    assert float(((flat - k).abs() / k.abs().amax(-1, keepdim=True)).max()) <= 0.5 / 127 * 1.0001
