"""Rotary embedding of queries and keys, and the writing of keys and values into paged planes, in one pass over qkv.

Planes may be int8 with a float32 scale per token and head. A slot of -1 writes nothing: rows that only pad a batch to
a captured size have it.

Shapes: T new tokens, Hq query heads, Hkv key-value heads, D head dimensions, P rotated pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import FLOATS, kernel, power_of_two, require, require_device, require_float
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.rows import quantized_tile

WIDEST_HEAD = 256
TILE = 1024  # elements of one program's tile of heads


def supported(head_dim: int, kv_dtype: torch.dtype) -> bool:
    """True if heads of this size can be rotated and written into planes of this type."""
    return 0 < head_dim <= WIDEST_HEAD and kv_dtype in (*FLOATS, torch.int8)


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

    `reference.rope`, then `reference.write_kv` (`int8.write_kv` with scales), in one launch: cos and sin are [T, P]
    float32, slots [T] int64, planes and scales as `Paged` describes them. With `norms`, weights [D] for q and for k,
    each head of q and k goes through `rms_norm` first. ValueError for other shapes and types.
    """
    paged = Paged(k_plane, v_plane, k_scale, v_scale)
    paged.check()
    tokens, heads, head_dim = _check(qkv, cos, sin)
    kv_heads = k_plane.shape[2]
    q_heads = heads - 2 * kv_heads
    require(q_heads > 0, f"qkv has {heads} heads, the planes {kv_heads}")
    require(k_plane.shape[3] == head_dim, f"qkv has {head_dim} dimensions, the planes {k_plane.shape[3]}")
    require(supported(head_dim, k_plane.dtype), f"planes of {k_plane.dtype} are not supported")
    require(slots.shape == (tokens,) and slots.dtype is torch.int64, "slots must be [T] int64")
    require_device(qkv, k_plane, slots, *(norms or ()))
    for weight in norms or ():
        require(weight.shape == (head_dim,) and weight.is_contiguous(), f"norms must be [{head_dim}]")
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    block = power_of_two(head_dim)
    tile = min(power_of_two(heads), max(1, TILE // block))
    _rope_write_kernel[(tokens, triton.cdiv(heads, tile))](
        qkv,
        q,
        cos,
        sin,
        slots,
        *paged.tensors(),
        *((qkv, qkv) if norms is None else norms),
        qkv.stride(0),
        qkv.stride(1),
        *paged.strides(),
        q_heads,
        kv_heads,
        head_dim,
        cos.shape[1],
        eps,
        NORM=norms is not None,
        BLOCK_SIZE=k_plane.shape[1],
        INT8=paged.int8,
        HEADS=tile,
        BLOCK_D=block,
    )
    return q


def _check(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int, int]:
    """The shape of qkv; ValueError unless the angles fit it."""
    require_float("qkv", qkv)
    require(qkv.dim() == 3 and qkv.stride(2) == 1, "qkv must be [T, heads, D] with the last stride 1")
    require_device(qkv, cos, sin)
    tokens, heads, head_dim = qkv.shape
    require(cos.shape == sin.shape and cos.dim() == 2 and len(cos) == tokens, "cos and sin must be [T, P]")
    require(2 * cos.shape[1] <= head_dim, f"{cos.shape[1]} pairs do not fit into {head_dim} dimensions")
    require(cos.dtype == sin.dtype == torch.float32, "cos and sin must be float32")
    require(cos.is_contiguous() and sin.is_contiguous(), "cos and sin must be contiguous")
    return tokens, heads, head_dim


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
    strides,  # `Paged.strides`
    BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr,
):
    plane_block, plane_token, plane_head, scale_block, scale_token, scale_head = strides
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
    _put(y.to(tl.float32), k_ptr, k_scale_ptr, slot, head - q_heads, d, is_k, strides, BLOCK_SIZE, INT8)
    v = tl.load(qkv_ptr + row + d, mask=is_v, other=0.0).to(tl.float32)
    _put(v, v_ptr, v_scale_ptr, slot, head - q_heads - kv_heads, d, is_v, strides, BLOCK_SIZE, INT8)
