"""Linear layers of every kind against torch, over shapes that do and do not fill panels, words and tiles."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from serving.kernels import cpu
from serving.kernels.cpu import Finish, Kind
from tests.serving.kernels.cpu.formulas import Plain, rms_norm

SHAPES = [(1, 64, 64), (3, 100, 70), (12, 33, 5), (13, 40, 33), (20, 40, 300), (64, 96, 64), (131, 70, 48)]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_int8_equals_exact_integer_products(
    kernels: cpu.Kernels, rows: int, outputs: int, inputs: int, bias: bool
) -> None:
    layer, x = Plain.random(Kind.INT8, outputs, inputs, bias=bias), torch.randn(rows, inputs)
    torch.testing.assert_close(kernels.linear(x, layer.packed(kernels)), layer(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F32])
def test_float_weights_equal_torch(kernels: cpu.Kernels, kind: Kind, rows: int, outputs: int, inputs: int) -> None:
    layer, x = Plain.random(kind, outputs, inputs, bias=True), torch.randn(rows, inputs)
    torch.testing.assert_close(kernels.linear(x, layer.packed(kernels)), layer(x), rtol=1e-5, atol=1e-5)


def test_extreme_int8_values_do_not_overflow(kernels: cpu.Kernels) -> None:
    weight = torch.full((32, 256), -128, dtype=torch.int8)
    x = torch.ones(2, 256)
    x[1] = -1
    out = kernels.linear(x, kernels.pack(weight, scale=torch.ones(32)))
    torch.testing.assert_close(out, torch.tensor([[-32768.0], [32768.0]]).expand(2, 32))


def test_a_row_of_zeros_gives_the_bias(kernels: cpu.Kernels) -> None:
    layer = Plain.random(Kind.INT8, 40, 64, bias=True)
    assert layer.bias is not None
    torch.testing.assert_close(kernels.linear(torch.zeros(1, 64), layer.packed(kernels))[0], layer.bias)


@pytest.mark.parametrize("rotation", [0, 32])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 95])
def test_what_is_no_number_spoils_its_own_row(kernels: cpu.Kernels, rotation: int, wrong: float, place: int) -> None:
    """Whatever is beside it: what is computed from it must not look like numbers."""
    layer, x = Plain.random(Kind.INT8, 40, 96, rotation=rotation).packed(kernels), torch.randn(2, 96)
    before = kernels.linear(x, layer)
    x[0, place] = wrong
    after = kernels.linear(x, layer)
    assert not after[0].isfinite().any() and torch.equal(after[1], before[1])


@pytest.mark.parametrize("kind", list(Kind))
def test_add_finish_adds_to_the_residual(kernels: cpu.Kernels, kind: Kind) -> None:
    layer, x, residual = Plain.random(kind, 72, 64), torch.randn(7, 64), torch.randn(7, 72)
    out = kernels.linear(x, layer.packed(kernels), finish=Finish.ADD, out=residual.clone())
    torch.testing.assert_close(out, residual + layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("width", [16, 40])
def test_swiglu_finish(kernels: cpu.Kernels, kind: Kind, width: int) -> None:
    gate, up, x = Plain.random(kind, width, 64), Plain.random(kind, width, 64), torch.randn(9, 64) * 4
    scale = None if gate.scale is None or up.scale is None else cpu.interleave(gate.scale, up.scale)
    packed = kernels.pack(cpu.interleave(gate.weight, up.weight), scale=scale)
    out = kernels.linear(x, packed, finish=Finish.SWIGLU)[:, :width]
    torch.testing.assert_close(out, F.silu(gate(x)) * up(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_row_has_the_same_bits_among_others(kernels: cpu.Kernels, kind: Kind) -> None:
    layer, x = Plain.random(kind, 100, 70).packed(kernels), torch.randn(150, 70)
    together = kernels.linear(x, layer)
    for first, last in ((0, 1), (5, 18), (70, 150)):
        assert torch.equal(kernels.linear(x[first:last], layer), together[first:last])


def test_rms_norm(kernels: cpu.Kernels) -> None:
    for n in (5, 64, 100):
        x, weight = torch.randn(6, n) * 3, torch.rand(n)
        torch.testing.assert_close(kernels.rms_norm(x, weight, 0.5), rms_norm(x, weight, 0.5), rtol=1e-5, atol=1e-6)


def test_mistakes_are_named(kernels: cpu.Kernels) -> None:
    with pytest.raises(ValueError, match="scale"):
        kernels.pack(torch.zeros(4, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="float16"):
        kernels.pack(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"\[M, 4\]"):
        kernels.linear(torch.zeros(1, 5), kernels.pack(torch.zeros(4, 4)))
    with pytest.raises(ValueError, match="forms"):
        cpu.load(form="abacus")
