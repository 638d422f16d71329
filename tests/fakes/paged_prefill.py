"""Stands in for the library FlashInfer 0.6.13, as far as prompts are attended by it: the same signatures, in torch.

What it has of the real one: lengths are read on the host; a plan goes to the device from pinned memory that the next
plan is written to, and is read there when attention runs; pages are found by indices, and reached by any strides.

Shapes: S sequences, P pages of all of them, T rows, Hq query heads, Hkv key-value heads, D head dimensions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.streams import streams_of

VERSION = "0.6.13"
MOST = 4096  # numbers of a plan
DOOR = "serving.kernels.gpu.flashinfer_prompts"


class BatchPrefillWithPagedKVCacheWrapper:
    """See the module."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        assert (kv_layout, use_cuda_graph, backend, jit_args) == ("NHD", False, "auto", None)
        self.device = float_workspace_buffer.device
        self.streams = streams_of(self.device)
        self._locked = self.streams.pinned(4 * MOST).view(torch.int32)
        self._there = self.streams.room(4 * MOST).view(torch.int32)
        self._indices: Tensor | None = None
        self._planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        page_size: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        sm_scale: Any = None,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: Any = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: Any = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
    ) -> None:
        assert causal and head_dim_vo is None and custom_mask is None and non_blocking
        lengths = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        assert all(one.dtype is torch.int32 and one.device.type == "cpu" for one in lengths)
        assert paged_kv_indices.dtype is torch.int32 and paged_kv_indices.device == self.device
        queries = (qo_indptr[1:] - qo_indptr[:-1]).tolist()
        assert max(queries) == max_token_per_sequence and min(queries) > 0
        pages = paged_kv_indptr[1:] - paged_kv_indptr[:-1]
        assert torch.equal((pages - 1) * page_size + paged_kv_last_page_len, seq_lens)
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        self._lengths = [self.streams.uploaded(one) for one in lengths]
        numbers = torch.cat((torch.tensor([len(seq_lens)], dtype=torch.int32), qo_indptr, paged_kv_indptr, seq_lens))
        self._locked[: len(numbers)].copy_(numbers)
        self._there.copy_(self._locked, non_blocking=True)
        self._indices = paged_kv_indices
        self._planned = {
            "rows": int(qo_indptr[-1]),
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "page_size": page_size,
            "types": (q_data_type, kv_data_type),
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "window_left": window_left,
        }

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
    ) -> Any:
        planned, (k, v) = self._planned, paged_kv_cache
        if len(q) != planned["rows"]:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({planned['rows']})")
        if out.shape != q.shape or out.dtype is not q.dtype:
            raise ValueError("out is not like q")
        assert out.is_contiguous() and q.stride(2) == 1 and k.stride() == v.stride() and k.stride(3) == 1
        assert (q.shape[1], *k.shape[2:]) == planned["heads"] and k.shape[1] == planned["page_size"]
        assert (q.dtype, k.dtype) == planned["types"]
        attend = partial(_attend, scale=planned["scale"], window_left=planned["window_left"])
        self.streams.launch(attend, out, q, k, v, self._there, self._indices)
        return out


def _attend(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: Tensor, indices: Tensor, *, scale: float, window_left: int
) -> None:
    count = int(plan[0])
    queries, pages, lengths = plan[1:].split([count + 1, count + 1, count, len(plan) - 3 * count - 3])[:3]
    for n in range(count):
        rows = slice(int(queries[n]), int(queries[n + 1]))
        held = indices[int(pages[n]) : int(pages[n + 1])].long()
        length, group = int(lengths[n]), q.shape[1] // k.shape[2]
        keys, values = (one[held].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * scale
        place = torch.arange(length - (rows.stop - rows.start), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None, :]
        seen = (key <= place) & ((key >= place - window_left) | (window_left < 0))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


@contextmanager
def flashinfer_installed() -> Iterator[ModuleType]:
    """The product finds the stand-in where it looks for the library."""
    library: Any = ModuleType("flashinfer")
    library.__spec__ = ModuleSpec("flashinfer", None)
    library.__version__ = VERSION
    library.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", library)
        sys.modules.pop(DOOR, None)
        try:
            yield library
        finally:
            sys.modules.pop(DOOR, None)
