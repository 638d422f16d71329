"""Rotary embedding, and the writing of keys and values into paged planes: one by one, or both in one pass over qkv.

Planes may be int8 with a float32 scale per token and head. A slot of -1 writes nothing: rows that only pad a batch to
a captured size have it.

Shapes: T new tokens, Hq query heads, Hkv key-value heads, N heads of any kind, D head dimensions, P rotated pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import kernel, power_of_two, require, require_device, require_float
from serving.kernels.gpu.rows import quantized_tile

WIDEST_HEAD = 256
TILE = 1024  # elements of one program's tile of heads


def supported(head_dim: int, kv_dtype: torch.dtype) -> bool:
    """Whether heads of this size can be rotated and written into planes of this type."""
    return 0 < head_dim <= WIDEST_HEAD and kv_dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by the angles of cos and sin [T, P] (float32). Both come back contiguous.

    Dimension p turns with dimension P + p; dimensions from 2P on pass unchanged. ValueError for other shapes and types.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check_heads("x", x)
    _check_angles(x, cos, sin)
    tokens, heads, head_dim = x.shape
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    block, tile = _tile(head_dim, heads)
    _rope_kernel[(tokens, triton.cdiv(heads, tile))](
        x, out, cos, sin, x.stride(0), x.stride(1), heads, head_dim, cos.shape[1], HEADS=tile, BLOCK_D=block
    )
    return out


def write_kv(
    k: Tensor,
    v: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store k and v [T, Hkv, D] at `slots` [T] int64 of planes [num_blocks, block_size, Hkv, D]; -1 stores nothing.

    Planes are of any strides but the last, which is 1. int8 planes take k_scale and v_scale [num_blocks, block_size,
    Hkv] float32, written along. ValueError for other shapes and types.
    """
    for name, x, plane, scale in (("k", k, k_plane, k_scale), ("v", v, v_plane, v_scale)):
        _check_heads(name, x)
        _check_plane(x, plane, scale, slots)
    if not k.numel():
        return
    block, tile = _tile(k.shape[2], k.shape[1])
    for x, plane, scale in ((k, k_plane, k_scale), (v, v_plane, v_scale)):
        _write_kernel[(x.shape[0], triton.cdiv(x.shape[1], tile))](
            x,
            plane,
            plane if scale is None else scale,
            slots,
            x.stride(0),
            x.stride(1),
            *plane.stride()[:3],
            *((0, 0, 0) if scale is None else scale.stride()),
            x.shape[1],
            x.shape[2],
            BLOCK_SIZE=plane.shape[1],
            INT8=scale is not None,
            HEADS=tile,
            BLOCK_D=block,
        )


def rope_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate the q and k of qkv [T, Hq + 2 Hkv, D], write k and v into the planes; returns q [T, Hq, D].

    The same as `rope`, then `write_kv`, in one launch; Hkv is the planes'. With `norms`, weights [D] for q and for k,
    each head of q and k goes through `rms_norm` first. ValueError for other shapes and types.
    """
    _check_heads("qkv", qkv)
    _check_angles(qkv, cos, sin)
    tokens, heads, head_dim = qkv.shape
    kv_heads = k_plane.shape[2]
    q_heads = heads - 2 * kv_heads
    require(q_heads > 0, f"qkv has {heads} heads, the planes {kv_heads}")
    for plane, scale in ((k_plane, k_scale), (v_plane, v_scale)):
        _check_plane(qkv[:, :kv_heads], plane, scale, slots)
    require(k_plane.stride() == v_plane.stride(), "both planes must have the same strides")
    for weight in norms or ():
        require(weight.shape == (head_dim,) and weight.is_contiguous(), f"norms must be [{head_dim}]")
        require_device(qkv, weight)
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    block, tile = _tile(head_dim, heads)
    scale_strides: tuple[int, ...] = (0, 0, 0)
    if k_scale is None or v_scale is None:
        k_scale, v_scale = k_plane, v_plane
    else:
        scale_strides = k_scale.stride()
        require(v_scale.stride() == scale_strides, "both planes' scales must have the same strides")
    _rope_write_kernel[(tokens, triton.cdiv(heads, tile))](
        qkv,
        q,
        cos,
        sin,
        slots,
        k_plane,
        v_plane,
        k_scale,
        v_scale,
        *((qkv, qkv) if norms is None else norms),
        qkv.stride(0),
        qkv.stride(1),
        *k_plane.stride()[:3],
        *scale_strides,
        q_heads,
        kv_heads,
        head_dim,
        cos.shape[1],
        eps,
        NORM=norms is not None,
        BLOCK_SIZE=k_plane.shape[1],
        INT8=k_plane.dtype is torch.int8,
        HEADS=tile,
        BLOCK_D=block,
    )
    return q


def _tile(head_dim: int, heads: int) -> tuple[int, int]:
    """(columns, heads) of one program."""
    block = power_of_two(head_dim)
    return block, min(power_of_two(heads), max(1, TILE // block))


def _check_heads(name: str, x: Tensor) -> None:
    require_float(name, x)
    require(x.dim() == 3 and x.stride(2) == 1, f"{name} must be [T, heads, D] with the last stride 1")
    require(x.shape[2] <= WIDEST_HEAD, f"heads of {x.shape[2]} dimensions are wider than {WIDEST_HEAD}")


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    require_device(x, cos, sin)
    require(cos.shape == sin.shape and cos.dim() == 2 and len(cos) == len(x), "cos and sin must be [T, P]")
    require(2 * cos.shape[1] <= x.shape[2], f"{cos.shape[1]} pairs do not fit into {x.shape[2]} dimensions")
    require(cos.dtype == sin.dtype == torch.float32, "cos and sin must be float32")
    require(cos.is_contiguous() and sin.is_contiguous(), "cos and sin must be contiguous")


def _check_plane(x: Tensor, plane: Tensor, scale: Tensor | None, slots: Tensor) -> None:
    """x [T, Hkv, D] against the plane it goes to."""
    require_device(x, plane, slots, *([] if scale is None else [scale]))
    require(plane.dim() == 4 and plane.shape[2:] == x.shape[1:], "planes must be [num_blocks, block_size, Hkv, D]")
    require(plane.stride(3) == 1, "the last stride of a plane must be 1")
    require(supported(plane.shape[3], plane.dtype), f"planes of {plane.dtype} are not supported")
    require((plane.dtype is torch.int8) == (scale is not None), "int8 planes have scales, others have none")
    require(scale is None or (scale.shape == plane.shape[:3] and scale.dtype is torch.float32), "scales do not fit")
    require(slots.shape == (len(x),) and slots.dtype is torch.int64, "slots must be [T] int64")


@kernel
def _partner(d, pairs):  # type: ignore[no-untyped-def]
    """The dimension that each one turns with."""
    return tl.where(d < pairs, d + pairs, d - pairs)


@kernel
def _rotated(x, other, cos_ptr, sin_ptr, pairs, d):  # type: ignore[no-untyped-def]
    """x [HEADS, BLOCK_D] float32 turned by the program's token's angles; `other` holds each dimension's partner."""
    token = tl.program_id(0).to(tl.int64)
    turned = d < 2 * pairs
    pair = tl.where(d < pairs, d, d - pairs)
    sign = tl.where(d < pairs, -1.0, 1.0)
    cos = tl.load(cos_ptr + token * pairs + pair, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + token * pairs + pair, mask=turned, other=0.0)
    return x * cos + sign * other * sin


@kernel
def _put(  # type: ignore[no-untyped-def]
    x,  # [HEADS, BLOCK_D] float32, 0 where masked
    plane_ptr,
    scale_ptr,
    slot,
    head,
    d,
    mask,
    plane_block,
    plane_token,
    plane_head,
    scale_block,
    scale_token,
    scale_head,
    BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr,
):
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = plane_ptr + block * plane_block + offset * plane_token + head[:, None] * plane_head + d
    if INT8:
        values, scales = quantized_tile(x)
        tl.store(at, values, mask=mask)
        here = scale_ptr + block * scale_block + offset * scale_token + head * scale_head
        tl.store(here, scales, mask=tl.max(mask.to(tl.int32), axis=1) > 0)
    else:
        tl.store(at, x.to(plane_ptr.dtype.element_ty), mask=mask)


@kernel
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    x_token,
    x_head,
    heads,
    head_dim,
    pairs,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads)[:, None] & (d < head_dim)
    row = token * x_token + head[:, None] * x_head
    x = tl.load(x_ptr + row + d, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + row + _partner(d, pairs), mask=mask & (d < 2 * pairs), other=0.0).to(tl.float32)
    y = _rotated(x, other, cos_ptr, sin_ptr, pairs, d)
    tl.store(out_ptr + (token * heads + head[:, None]) * head_dim + d, y.to(out_ptr.dtype.element_ty), mask=mask)


@kernel
def _write_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    plane_ptr,
    scale_ptr,
    slots_ptr,
    x_token,
    x_head,
    plane_block,
    plane_token,
    plane_head,
    scale_block,
    scale_token,
    scale_head,
    heads,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads)[:, None] & (d < head_dim)
    x = tl.load(x_ptr + token * x_token + head[:, None] * x_head + d, mask=mask, other=0.0).to(tl.float32)
    strides = plane_block, plane_token, plane_head, scale_block, scale_token, scale_head
    _put(x, plane_ptr, scale_ptr, slot, head, d, mask, *strides, BLOCK_SIZE, INT8)


@kernel
def _rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    q_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_token,
    qkv_head,
    plane_block,
    plane_token,
    plane_head,
    scale_block,
    scale_token,
    scale_head,
    q_heads,
    kv_heads,
    head_dim,
    pairs,
    eps,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Heads lie in the order q, k, v; a tile may hold some of each, and every store is masked to its own.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = d < head_dim
    is_q = (head < q_heads)[:, None] & inside
    is_k = ((head >= q_heads) & (head < q_heads + kv_heads))[:, None] & inside
    is_v = ((head >= q_heads + kv_heads) & (head < q_heads + 2 * kv_heads))[:, None] & inside
    row = token * qkv_token + head[:, None] * qkv_head
    kind = qkv_ptr.dtype.element_ty
    partner, turned = _partner(d, pairs), d < 2 * pairs
    x = tl.load(qkv_ptr + row + d, mask=is_q | is_k, other=0.0).to(tl.float32)
    other = tl.load(qkv_ptr + row + partner, mask=(is_q | is_k) & turned, other=0.0).to(tl.float32)
    if NORM:
        of_q = (head < q_heads)[:, None]
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)[:, None]
        q_weight = tl.load(q_norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
        x = (x * factor * tl.where(of_q, q_weight, k_weight)).to(kind).to(tl.float32)
        q_weight = tl.load(q_norm_ptr + partner, mask=inside & turned, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + partner, mask=inside & turned, other=0.0).to(tl.float32)
        other = (other * factor * tl.where(of_q, q_weight, k_weight)).to(kind).to(tl.float32)
    y = _rotated(x, other, cos_ptr, sin_ptr, pairs, d).to(kind)
    tl.store(q_ptr + (token * q_heads + head[:, None]) * head_dim + d, y, mask=is_q)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    strides = plane_block, plane_token, plane_head, scale_block, scale_token, scale_head
    _put(y.to(tl.float32), k_ptr, k_scale_ptr, slot, head - q_heads, d, is_k, *strides, BLOCK_SIZE, INT8)
    v = tl.load(qkv_ptr + row + d, mask=is_v, other=0.0).to(tl.float32)
    _put(v, v_ptr, v_scale_ptr, slot, head - q_heads - kv_heads, d, is_v, *strides, BLOCK_SIZE, INT8)
