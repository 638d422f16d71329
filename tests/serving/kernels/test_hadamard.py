"""Hadamard transforms against the matrix of Sylvester's construction, which they multiply by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.kernels import hadamard, int8


def sylvester(order: int) -> Tensor:
    """[order, order] float64: the signs are the parities of the bits that row and column share."""
    numbers = range(order)
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in numbers] for i in numbers], dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(exponent=st.integers(0, 9), blocks=st.integers(1, 3), rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_it_multiplies_by_the_matrix_and_undoes_itself(exponent: int, blocks: int, rows: int, seed: int) -> None:
    block = 1 << exponent
    x = torch.randn(rows, blocks * block, generator=torch.Generator().manual_seed(seed))
    found = hadamard.transformed(x, block)
    expected = (x.double().unflatten(-1, (blocks, block)) @ sylvester(block)).flatten(-2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * block)
    torch.testing.assert_close(hadamard.transformed(found, block) / block, x, rtol=1e-5, atol=1e-5)
    if rows:
        assert torch.equal(hadamard.transformed(x[:1], block), found[:1]), "a row's bits are its own"


@given(width=st.integers(1, 1 << 16))
def test_blocks_fill_their_width(width: int) -> None:
    block = hadamard.block_of(width)
    if block:
        assert width % block == 0 and block & (block - 1) == 0
        assert 16 <= block <= 512
        assert block == 512 or width % (2 * block), "a larger block would fit as well"
    else:
        assert width % 16


@pytest.mark.parametrize(("width", "rotation"), [(96, 32), (512, 512), (192, 64)])
def test_a_layer_of_transformed_inputs_is_the_layer(width: int, rotation: int) -> None:
    """Weights are transformed like the inputs: their product stays what it was, but for what is rounded."""
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(6, width, generator=generator), torch.randn(40, width, generator=generator)
    values, scale = int8.quantize_rows(hadamard.transformed(weight, rotation) / rotation**0.5)
    found = int8.linear(x, values, scale, None, rotation)
    expected = x @ weight.t()
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_one_huge_input_leaves_room_for_the_others() -> None:
    """Without the transform all others would be rounded to 0: they are less than half of a 127th of it."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8, 512, generator=generator), torch.randn(32, 512, generator=generator)
    x[:, 100], weight[:, 100] = 1000.0, 0.0
    expected = x @ weight.t()

    def error(rotation: int) -> float:
        rotated = hadamard.transformed(weight, rotation) / rotation**0.5 if rotation else weight
        found = int8.linear(x, *int8.quantize_rows(rotated), None, rotation)
        return float((found - expected).norm() / expected.norm())

    assert error(0) > 0.9
    assert error(512) < 0.5 < error(16)
