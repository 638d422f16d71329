"""RMSNorm, SiLU·mul and quantization by rows, fused and not, against the reference and the formula of the scales."""

from __future__ import annotations

import pytest
import torch

from serving.kernels import gpu, reference
from tests.serving.kernels.gpu.formulas import CLOSE, error, quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_quantized(found: gpu.Quantized, expected: torch.Tensor) -> None:
    """Within one step of the integers, most exactly so where nothing was truncated on the way."""
    values, scales = quantized(expected)
    torch.testing.assert_close(found.scales.cpu(), scales, rtol=2 * CLOSE[expected.dtype], atol=0)
    off = (found.values.cpu().int() - values.int()).abs()
    assert off.max() <= 1
    if expected.dtype is not torch.bfloat16:
        assert (off > 0).float().mean() < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 96), (3, 2049), (0, 64)])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, device: torch.device) -> None:
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    found, _ = gpu.add_rms_norm(x.to(device), None, weight.to(device), 1e-5)
    assert found.dtype is dtype
    assert error(found, reference.rms_norm(x, weight, 1e-5)) < CLOSE[dtype]


def test_rms_norm_of_a_slice_of_heads(device: torch.device) -> None:
    qkv, weight = torch.randn(4, 9, 64), torch.randn(64)
    found, _ = gpu.add_rms_norm(qkv.to(device)[:, 2:7], None, weight.to(device), 1e-6)
    assert error(found, reference.rms_norm(qkv[:, 2:7], weight, 1e-6)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_the_residual(dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (torch.randn(3, 80).to(dtype), torch.randn(3, 80).to(dtype), torch.randn(80).to(dtype))
    on_device = [tensor.to(device) for tensor in (x, residual, weight)]
    normed, summed = gpu.add_rms_norm(*on_device, 1e-5)
    assert error(summed, x + residual) < CLOSE[dtype]
    expected = reference.rms_norm(x + residual, weight, 1e-5)
    assert error(normed, expected) < CLOSE[dtype]
    values, again = gpu.add_rms_norm(*on_device, 1e-5, quantized=True)
    assert torch.equal(again, summed)
    assert_quantized(values, expected)
    plain, _ = gpu.add_rms_norm(on_device[0], None, on_device[2], 1e-5, quantized=True)
    assert_quantized(plain, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(4, 48), (2, 3000)])
def test_silu_mul(dtype: torch.dtype, rows: int, width: int, device: torch.device) -> None:
    gate_up = (3 * torch.randn(rows, 2 * width)).to(dtype)
    expected = reference.silu_mul(gate_up)
    assert error(gpu.silu_mul(gate_up.to(device)), expected) < CLOSE[dtype]
    assert_quantized(gpu.silu_mul(gate_up.to(device), quantized=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(6, 100) * torch.logspace(-6, 4, 6)[:, None]).to(dtype)
    x[2] = 0
    found = gpu.quantize(x.to(device))
    values, scales = quantized(x)
    assert torch.equal(found.scales.cpu(), scales)
    assert (found.values.cpu().int() - values.int()).abs().max() <= 1
    assert not found.values[2].any()
    assert found.values.cpu().int().abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127, 127]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_shows(wrong: float, device: torch.device) -> None:
    x = torch.randn(3, 40)
    x[1, 7] = wrong
    scales = gpu.quantize(x.to(device)).scales.cpu()
    assert scales.isnan().tolist() == [False, True, False]


def test_what_is_refused(device: torch.device) -> None:
    x = torch.randn(4, 64, device=device)
    with pytest.raises(ValueError, match="weight must be"):
        gpu.add_rms_norm(x, None, x[0, :32], 1e-5)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        gpu.quantize(x.double())
    with pytest.raises(ValueError, match="stride 1"):
        gpu.quantize(x.T)
    with pytest.raises(ValueError, match="even"):
        gpu.silu_mul(x[:, :63])
