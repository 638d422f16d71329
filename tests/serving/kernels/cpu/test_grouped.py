"""INT8 layers of several experts in one call have the bits of the plain formula, wherever rows lie."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serving.kernels import cpu, int8
from serving.kernels.cpu.grouped import GroupedLinear, PlacedRows

COUNTS = (3, 0, 70, 1)  # rows of each slot: a block and more, a tile, one, none
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def two_threads() -> Iterator[cpu.Kernels]:
    loaded = cpu.load(threads=2)
    assert loaded is not None
    yield loaded
    loaded.close()


@dataclass(frozen=True, slots=True)
class Layers:
    """Of each slot."""

    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]

    @classmethod
    def random(cls, slots: int, outputs: int, inputs: int, bias: torch.dtype | None = None) -> Layers:
        return cls(
            [torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8) for _ in range(slots)],
            [torch.rand(outputs) for _ in range(slots)],
            [None if bias is None else torch.randn(outputs).to(bias) for _ in range(slots)],
        )

    @property
    def joined(self) -> GroupedLinear:
        return GroupedLinear(self.weights, self.scales, self.biases)

    def expected(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """[N, outputs] in x's type, slot by slot."""
        parts = zip(torch.split(x, list(counts)), self.weights, self.scales, self.biases, strict=True)
        return torch.cat([int8.linear(part, weight, scale, bias) for part, weight, scale, bias in parts])


def computed(
    kernels: cpu.Kernels, layers: Layers, x: Tensor | PlacedRows, counts: Sequence[int], like: Tensor
) -> Tensor:
    out = torch.full_like(like, 7.0)
    return layers.joined(kernels, x, torch.tensor(counts, dtype=torch.int32), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [1, 3, 64, 91, 512])
@pytest.mark.parametrize("outputs", [1, 4, 37, 256])
def test_the_bits_are_those_of_the_formula(kernels: cpu.Kernels, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    layers, x = Layers.random(len(COUNTS), outputs, inputs), torch.randn(sum(COUNTS), inputs).to(dtype)
    expected = layers.expected(x, COUNTS)
    assert torch.equal(computed(kernels, layers, x, COUNTS, expected), expected)
    placed = PlacedRows.of(*int8.quantize_rows(x))
    assert torch.equal(computed(kernels, layers, placed, COUNTS, expected), expected)


@pytest.mark.parametrize("bias", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_are_added(kernels: cpu.Kernels, dtype: torch.dtype, bias: torch.dtype) -> None:
    layers, x = Layers.random(len(COUNTS), 37, 91, bias), torch.randn(sum(COUNTS), 91).to(dtype)
    expected = layers.expected(x, COUNTS)
    assert torch.equal(computed(kernels, layers, x, COUNTS, expected), expected)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 140), st.integers(1, 40), st.booleans())
def test_threads_and_places_change_nothing(
    two_threads: cpu.Kernels, counts: list[int], inputs: int, outputs: int, same: bool
) -> None:
    """Rows lie in any order, apart, and some several times where one row goes to several slots."""
    layers, total = Layers.random(len(counts), outputs, inputs), sum(counts)
    held, scale = int8.quantize_rows(torch.randn(max(1, total), 2 * inputs + 3))
    at = [0 if same else place for place in random.Random(total).sample(range(total), total)]
    first, size = held.data_ptr() + 1, held.shape[1]  # not aligned either
    placed = PlacedRows(torch.tensor([first + place * size for place in at], dtype=torch.int64), scale[at])
    values = held[at, 1 : 1 + inputs].contiguous()
    parts = zip(torch.split(values, counts), torch.split(scale[at], counts), layers.weights, layers.scales, strict=True)
    expected = torch.cat([int8.quantized_linear(*part, None) for part in parts])
    assert torch.equal(computed(two_threads, layers, placed, counts, expected), expected)


@pytest.mark.parametrize("inputs", [64, 70_000])
def test_the_largest_products_do_not_overflow(kernels: cpu.Kernels, inputs: int) -> None:
    weight = torch.full((2, inputs), 127, dtype=torch.int8)
    weight[1] = -128
    layers = Layers([weight], [torch.ones(2)], [None])
    rows = torch.full((2, inputs), 127, dtype=torch.int8)
    rows[1] = -127
    out = computed(kernels, layers, PlacedRows.of(rows, torch.ones(2)), [2], torch.empty(2, 2))
    most = torch.tensor([127 * 127 * inputs, -128 * 127 * inputs]).float()
    assert torch.equal(out, torch.stack([most, -most]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(kernels: cpu.Kernels, dtype: torch.dtype) -> None:
    layers, x = Layers.random(1, 37, 91), torch.randn(3, 91).to(dtype)
    x[1, 5] = float("nan")
    out = computed(kernels, layers, x, [3], torch.empty(3, 37, dtype=dtype))
    assert out[1].isnan().all() and torch.equal(out[::2], layers.expected(x[::2], [2]))


def test_no_rows_are_no_work(kernels: cpu.Kernels) -> None:
    layers = Layers.random(2, 4, 8)
    assert computed(kernels, layers, torch.empty(0, 8), [0, 0], torch.empty(0, 4)).shape == (0, 4)


def test_counts_of_other_rows_are_refused(kernels: cpu.Kernels) -> None:
    layers = Layers.random(2, 4, 8)
    with pytest.raises(AssertionError):
        computed(kernels, layers, torch.randn(3, 8), [2, 2], torch.empty(3, 4))


def test_layers_that_do_not_go_together_are_refused() -> None:
    one, other = Layers.random(1, 4, 8), Layers.random(1, 4, 9)
    with pytest.raises(ValueError, match="one shape"):
        GroupedLinear([*one.weights, *other.weights], [*one.scales, *other.scales], [None, None])
    with pytest.raises(ValueError, match="INT8"):
        GroupedLinear([torch.randn(4, 8)], one.scales, [None])
    with pytest.raises(ValueError, match="biases of one type"):
        GroupedLinear([*one.weights, *one.weights], [*one.scales, *one.scales], [None, torch.randn(4)])
    with pytest.raises(ValueError, match="contiguous"):
        GroupedLinear([torch.randint(-9, 9, (8, 4), dtype=torch.int8).t()], one.scales, [None])
