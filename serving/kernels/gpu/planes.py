"""The paged keys and values of one layer as the attention kernels take them, and how a tile of them is read.

Shapes: Hkv key-value heads, D head dimensions, L tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import kernel, require, require_device

# A tile waits for its block table, so the pipeline has two stages for each tile in flight; these are two tiles.
STAGES = 5
SCALE_THREADS = tl.constexpr(256)  # of the kernels over int8


@dataclass(frozen=True, slots=True)
class Paged:
    """k and v [num_blocks, block_size, Hkv, D]; with int8 also their scales [num_blocks, block_size, Hkv] float32."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def int8(self) -> bool:
        return self.k.dtype is torch.int8

    def check(self) -> None:
        """Raises ValueError unless all fit together."""
        k, v, k_scale, v_scale = self.k, self.v, self.k_scale, self.v_scale
        require_device(k, v)
        require(k.dim() == 4 and k.shape == v.shape, "planes must be [num_blocks, block_size, Hkv, D], both alike")
        require(k.dtype is v.dtype and k.stride() == v.stride(), "both planes must have the same type and strides")
        require(k.stride(3) == 1, "the last stride of a plane must be 1")
        if k_scale is None or v_scale is None:
            require(k_scale is v_scale and not self.int8, "int8 planes have scales, others have none")
            return
        require(self.int8, "int8 planes have scales, others have none")
        require(k_scale.shape == k.shape[:3] and v_scale.shape == k.shape[:3], "scales must be the planes' without D")
        require(k_scale.dtype is v_scale.dtype is torch.float32, "scales must be float32")
        require(k_scale.stride() == v_scale.stride(), "both scales must have the same strides")
        require_device(k, k_scale, v_scale)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k, v and their scales; for planes without scales, tensors that are never read in their place."""
        k_scale = self.k if self.k_scale is None else self.k_scale
        return self.k, self.v, k_scale, self.v if self.v_scale is None else self.v_scale

    def strides(self) -> tuple[int, ...]:
        """Block, token and head of the planes, then of the scales."""
        return *self.k.stride()[:3], *((0, 0, 0) if self.k_scale is None else self.k_scale.stride())


@kernel
def _scales(k_scale_ptr, v_scale_ptr, at, stored, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of keys and of values [L] float32, 0 where nothing is stored: two columns of a load that has one element
    for each thread at least.

    Triton takes a smaller load for a cheap one, and has each thread load all scales of its scores: 16 times two.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    pointers = tl.where(column == 0, k_scale_ptr + at[:, None], v_scale_ptr + at[:, None])
    scales = tl.load(pointers, mask=stored[:, None] & (column < 2), other=0.0)
    return tl.sum(tl.where(column == 0, scales, 0.0), axis=1), tl.sum(tl.where(column == 1, scales, 0.0), axis=1)


@kernel
def attend(  # type: ignore[no-untyped-def]
    q,  # [M, D] of the type products are computed in
    top,  # [M] float32: each row's greatest score so far
    total,  # [M] float32: sum of exp2(score - top)
    acc,  # [M, D] float32: the same sum, weighted with the values
    position,  # [L] of the tile's tokens
    context,
    last,  # [M] the last position each row may see
    planes,  # pointers to k, v, their scales and the sequence's block table, and the key-value head
    strides,  # `Paged.strides`
    scale_log2,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    WEIGHTS: tl.constexpr,  # the type the weights are rounded to before they meet the values
):
    """One tile of the online softmax (arXiv 1805.02867): (top, total, acc) with the tile's tokens taken in.

    A row that sees nothing of the tile keeps its numbers to the bit. Without MASKED every row sees all of the tile.
    """
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head = planes
    plane_block, plane_token, plane_head, scale_block, scale_token, scale_head = strides
    d = tl.arange(0, BLOCK_D)
    stored = (position < context) if MASKED else (position >= 0)
    loaded = stored[:, None] & (d < HEAD_DIM)[None, :]
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
    offset = position % BLOCK_SIZE
    at = (block * plane_block + offset * plane_token + head * plane_head)[:, None] + d[None, :]
    keys = tl.load(k_ptr + at, mask=loaded, other=0.0).to(q.dtype)
    scores = tl.dot(q, keys.T, input_precision="ieee") * scale_log2
    if INT8:
        scale_at = block * scale_block + offset * scale_token + head * scale_head
        k_scale, v_scale = _scales(k_scale_ptr, v_scale_ptr, scale_at, stored, SCALE_THREADS // position.shape[0])
        scores *= k_scale[None, :]
    if MASKED:
        seen = position[None, :] <= last[:, None]
        if WINDOW:
            seen = seen & (position[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen nothing yet has the top -inf, and -inf - -inf is not a number.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - shift)
    weights = tl.exp2(scores - shift[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    if INT8:
        weights *= v_scale[None, :]
    values = tl.load(v_ptr + at, mask=loaded, other=0.0).to(q.dtype)
    acc = tl.dot(weights.to(WEIGHTS).to(q.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc
