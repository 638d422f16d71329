"""Rotation and KV writing in one pass, into plain and int8 planes, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serving.kernels import gpu, reference
from tests.serving.kernels.gpu.formulas import CLOSE, error, quantized, write_unrotated

BLOCK, BLOCKS = 16, 5
SLOTS = [3, 17, 64, 79, 16]


def angles(pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(len(SLOTS), pairs) * 10
    return angle.cos(), angle.sin()


def plane(kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every second block of a tensor of 7s."""
    return torch.full((BLOCKS, 2, BLOCK, kv_heads, head_dim), 7, dtype=dtype, device=device)[:, 0]


@pytest.mark.parametrize(
    ("dtype", "plane_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pairs"),
    [(9, 3, 64, 32), (4, 4, 80, 20), (2, 1, 128, 64), (4, 1, 128, 32), (21, 3, 64, 32)],
)
def test_queries_and_keys_are_rotated(
    heads: int,
    kv_heads: int,
    head_dim: int,
    pairs: int,
    dtype: torch.dtype,
    plane_dtype: torch.dtype,
    device: torch.device,
) -> None:
    qkv = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = angles(pairs)
    slots = torch.tensor(SLOTS)
    planes = [plane(kv_heads, head_dim, plane_dtype, device) for _ in range(2)]
    scales = list(torch.zeros(2, BLOCKS, BLOCK, kv_heads, device=device)) if plane_dtype is torch.int8 else []
    found = gpu.rope_write_kv(*(tensor.to(device) for tensor in (qkv, cos, sin, slots)), *planes, *scales)
    q, k = reference.rope(q, k, cos, sin)
    assert found.dtype is dtype
    assert error(found, q) < CLOSE[dtype]
    for which, expected in enumerate((k, v)):
        written = planes[which].cpu()[slots // BLOCK, slots % BLOCK].float()
        if scales:
            written *= scales[which].cpu()[slots // BLOCK, slots % BLOCK, :, None]
        assert error(written, expected) < (1e-2 if scales else CLOSE[dtype])


@pytest.mark.parametrize("plane_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (2, 80), (9, 128)])
def test_write_kv(kv_heads: int, head_dim: int, plane_dtype: torch.dtype, device: torch.device) -> None:
    k, v = torch.randn(2, len(SLOTS), kv_heads, head_dim).bfloat16()
    slots = torch.tensor(SLOTS)
    slots[2] = -1
    kept = [0, 1, 3, 4]
    planes = [plane(kv_heads, head_dim, plane_dtype, device) for _ in range(2)]
    scales = [torch.full((BLOCKS, BLOCK, kv_heads), 7.0, device=device) for _ in range(2)]
    extra = scales if plane_dtype is torch.int8 else []
    write_unrotated(k.to(device), v.to(device), slots.to(device), *planes, *extra)
    for x, written, scale in zip((k, v), planes, scales, strict=True):
        expected = torch.full((BLOCKS, BLOCK, kv_heads, head_dim), 7, dtype=plane_dtype)
        if plane_dtype is torch.int8:
            values, row_scales = quantized(x)
            expected_scales = torch.full((BLOCKS, BLOCK, kv_heads), 7.0)
            expected_scales.view(-1, kv_heads)[slots[kept]] = row_scales[kept]
            assert torch.equal(scale.cpu(), expected_scales)
        else:
            values = x.to(plane_dtype)
        expected.view(-1, kv_heads, head_dim)[slots[kept]] = values[kept]
        difference = (written.cpu().float() - expected.float()).abs()
        assert difference.max() <= (1 if plane_dtype is torch.int8 else 0)
        assert difference.mean() < 0.01


@pytest.mark.parametrize(("dtype", "pairs"), [(torch.float32, 32), (torch.bfloat16, 32), (torch.float32, 16)])
def test_norms_of_heads_come_first(dtype: torch.dtype, pairs: int, device: torch.device) -> None:
    heads, kv_heads, eps = 5, 2, 1e-3
    qkv = (3 * torch.randn(len(SLOTS), heads + 2 * kv_heads, 64)).to(dtype)
    norms = tuple((1 + torch.randn(64)).to(dtype) for _ in range(2))
    cos, sin = angles(pairs)
    planes = [plane(kv_heads, 64, dtype, device) for _ in range(2)]
    found = gpu.rope_write_kv(
        *(tensor.to(device) for tensor in (qkv, cos, sin, torch.tensor(SLOTS))),
        *planes,
        norms=(norms[0].to(device), norms[1].to(device)),
        eps=eps,
    )
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q, k = (reference.rms_norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
    q, k = reference.rope(q, k, cos, sin)
    assert error(found, q) < 2 * CLOSE[dtype]
    for one, expected in zip(planes, (k, v), strict=True):
        written = one.cpu()[torch.tensor(SLOTS) // BLOCK, torch.tensor(SLOTS) % BLOCK]
        assert error(written, expected) < 2 * CLOSE[dtype]


def test_what_is_refused(device: torch.device) -> None:
    k = torch.randn(5, 2, 64, device=device)
    slots = torch.tensor(SLOTS, device=device)
    float_plane, int8_plane = (plane(2, 64, dtype, device) for dtype in (torch.float32, torch.int8))
    with pytest.raises(ValueError, match="int8 planes have scales"):
        write_unrotated(k, k, slots, int8_plane, int8_plane)
    with pytest.raises(ValueError, match="num_blocks"):
        write_unrotated(k, k, slots, float_plane[0], float_plane[0])
    with pytest.raises(ValueError, match="dimensions"):
        write_unrotated(k[..., :32], k[..., :32], slots, float_plane, float_plane)
    with pytest.raises(ValueError, match="slots"):
        write_unrotated(k, k, slots[:3], float_plane, float_plane)
    with pytest.raises(ValueError, match="norms must be"):
        angle = torch.zeros(5, 32, device=device)
        norms = (torch.ones(32, device=device), torch.ones(64, device=device))
        gpu.rope_write_kv(k[:, [0, 1, 0, 1, 0]], angle, angle, slots, float_plane, float_plane, norms=norms)
    with pytest.raises(ValueError, match="do not fit"):
        gpu.rope_write_kv(k, *torch.randn(2, 5, 40, device=device), slots, float_plane[:, :, :1], float_plane[:, :, :1])
