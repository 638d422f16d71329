"""INT8 layers whose inputs are transformed before they are quantized: alone, and in the fused step's every path."""

from __future__ import annotations

import itertools

import pytest
import torch

from serving.kernels import cpu, int8
from serving.kernels.cpu import Finish, Kind
from serving.kernels.layer_weights import MoeWeights
from tests.serving.kernels.cpu.formulas import Plain, PlainExperts, SmallDecoder
from tests.serving.kernels.cpu.test_decoder import PROMPT, TOLERANCE, batch_of

WIDTHS = [(16, 16), (96, 32), (64, 64), (384, 128), (768, 256), (1536, 512), (2048, 1024)]


@pytest.mark.parametrize(("inputs", "rotation"), WIDTHS)
@pytest.mark.parametrize("rows", [1, 21])
def test_a_layer_equals_the_formula(kernels: cpu.Kernels, inputs: int, rotation: int, rows: int) -> None:
    layer = Plain.random(Kind.INT8, 40, inputs, bias=True, rotation=rotation)
    x = torch.randn(rows, inputs) * torch.logspace(-2, 2, inputs)
    got, before = kernels.linear(x, layer.packed(kernels)), x.clone()
    assert torch.equal(x, before), "inputs are the caller's"
    assert layer.scale is not None
    expected = int8.linear(x, layer.weight, layer.scale, layer.bias, rotation)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    plain = layer(x)  # by another order of additions: a tie may fall either way
    assert (got - plain).norm() < 1e-3 * plain.norm()


def test_swiglu_and_residual_of_transformed_inputs(kernels: cpu.Kernels) -> None:
    gate, up, down = (Plain.random(Kind.INT8, *shape, rotation=32) for shape in ((96, 64), (96, 64), (64, 96)))
    x, residual = torch.randn(9, 64), torch.randn(9, 64)
    assert gate.scale is not None and up.scale is not None
    scale = cpu.interleave(gate.scale, up.scale)
    packed = kernels.pack(cpu.interleave(gate.weight, up.weight), scale=scale, rotation=32)
    inner = kernels.linear(x, packed, finish=Finish.SWIGLU)[:, :96]
    torch.testing.assert_close(inner, torch.nn.functional.silu(gate(x)) * up(x), rtol=1e-3, atol=1e-3)
    out = kernels.linear(inner, down.packed(kernels), finish=Finish.ADD, out=residual.clone())
    torch.testing.assert_close(out, residual + down(inner), rtol=1e-3, atol=1e-3)


def rotated(kv_kind: Kind = Kind.BF16, **options: int) -> SmallDecoder:
    return SmallDecoder(kind=Kind.INT8, kv_kind=kv_kind, intermediate=144, rotated=True, **options)


@pytest.mark.parametrize("kv_kind", [Kind.BF16, Kind.INT8])
def test_logits_equal_the_formulas(kernels: cpu.Kernels, kv_kind: Kind) -> None:
    small = rotated(kv_kind)
    got = small.build(kernels).step(batch_of([(0, PROMPT)], all_rows=True))
    error, expected = (got - (wanted := small.logits(PROMPT))).abs(), wanted.std()
    assert error.max() < TOLERANCE[Kind.INT8] * expected
    assert error.mean() < 0.1 * TOLERANCE[Kind.INT8] * expected


def test_bits_do_not_depend_on_how_a_prompt_is_cut(kernels: cpu.Kernels) -> None:
    """By rows, by panels, and with few enough rows for each thread to make all of them ready."""
    small = rotated()
    decoder = small.build(kernels)
    whole = decoder.step(batch_of([(0, PROMPT)], all_rows=True))
    for cut in ([1] * 5 + [60, 64, 71], [130, 4, 3, 2] + [1] * 61, [3, 197]):
        ends = list(itertools.accumulate(cut))
        starts = [end - count for end, count in zip(ends, cut, strict=True)]
        spans = zip(starts, ends, strict=True)
        parts = [decoder.step(batch_of([(start, PROMPT[start:end])], all_rows=True)) for start, end in spans]
        assert torch.equal(torch.cat(parts), whole)


def test_layers_beside_experts(kernels: cpu.Kernels) -> None:
    small = rotated(experts=4, dense=(0,))
    got = small.build(kernels).step(batch_of([(0, PROMPT[:40])], all_rows=True))
    error = (got - small.logits(PROMPT[:40])).abs()
    assert error.median() < 0.1 * TOLERANCE[Kind.INT8] * got.std()


def test_what_cannot_be_is_refused(kernels: cpu.Kernels) -> None:
    weight, scale = torch.zeros(4, 48, dtype=torch.int8), torch.ones(4)
    for wrong in (8, 32, 48):
        with pytest.raises(ValueError, match=f"transformed {wrong} at a time"):
            kernels.pack(weight, scale=scale, rotation=wrong)
    with pytest.raises(ValueError, match="16 at a time"):
        kernels.pack(weight.float(), rotation=16)
    plain = PlainExperts.random(Kind.INT8, 64, 32, 2, 1)
    for mlp in plain.experts:
        object.__setattr__(mlp, "down", Plain.random(Kind.INT8, 64, 32, rotation=32))
    packed = plain.packed(kernels)
    assert isinstance(packed, MoeWeights)
    with pytest.raises(ValueError, match="inputs of experts"):
        cpu.PackedExperts(packed)
