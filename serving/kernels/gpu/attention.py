"""Paged attention: checks its arguments and launches the kernels that the batch's sequences need.

Sequences with several queries go to what attends prompts (`prompts`), then those with one to `decode_attention`, which
splits their context over programs. With Triton's kernels a row's numbers depend on its own sequence alone, whatever
else is in the batch. A sequence with KV in host memory is alone in its batch: `offloaded_attention`.

Shapes: T new tokens, Hq query heads, Hkv key-value heads, D head dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.gpu.decode_attention import decode_attention
from serving.kernels.gpu.launch import FLOATS, require, require_device
from serving.kernels.gpu.offloaded_attention import offloaded_attention
from serving.kernels.gpu.planes import Paged
from serving.kernels.gpu.prompt_attention import LARGEST_GROUP
from serving.kernels.gpu.prompts import PromptStep, TritonStep

WIDEST_HEAD = 256


def supported(heads: int, kv_heads: int, head_dim: int, query_dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """True if attention of this shape can be computed: planes of the queries' type, or int8."""
    return (
        0 < head_dim <= WIDEST_HEAD
        and head_dim % 8 == 0
        and heads % kv_heads == 0
        and heads // kv_heads <= LARGEST_GROUP
        and query_dtype in FLOATS
        and kv_dtype in (query_dtype, torch.int8)
    )


def paged_attention(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    prompts: PromptStep | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over each sequence's own blocks; returns [T, Hq, D] in q's dtype.

    Planes are [num_blocks, block_size, Hkv, D] of q's dtype, or int8 with k_scale and v_scale [num_blocks, block_size,
    Hkv] float32; any strides but the last, which is 1. `window` limits a query to that many last tokens, its own
    included. This step's k and v must be written already; of a batch with `offloaded` KV the planes hold the rest. A
    sequence with a context of 0 gets zeros. `prompts` attends sequences with several queries, of this batch and over
    such planes; None: the Triton kernel does. ValueError for other shapes and types.
    """
    paged = Paged(k_plane, v_plane, k_scale, v_scale)
    paged.check()
    require_device(q, k_plane, batch.block_tables)
    require(q.dim() == 3 and q.stride(2) == 1, "q must be [T, Hq, D] with the last stride 1")
    heads, head_dim = q.shape[1:]
    require(head_dim == k_plane.shape[3], f"q has {head_dim} dimensions, the planes {k_plane.shape[3]}")
    kv_heads = k_plane.shape[2]
    require(
        supported(heads, kv_heads, head_dim, q.dtype, k_plane.dtype),
        f"attention of {heads} heads over {kv_heads}, {head_dim} dimensions, {q.dtype} over {k_plane.dtype}"
        " is not supported",
    )
    require(window is None or window > 0, f"a window of {window} tokens sees nothing")
    if batch.offloaded is not None:
        return offloaded_attention(q, paged, batch, scale, window)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if any(count > 1 for count in batch.query_lens):
        (prompts or TritonStep(batch)).attend(q, paged, scale, window, out)
    if 1 in batch.query_lens:
        decode_attention(q, paged, batch, scale, window, out)
    return out
