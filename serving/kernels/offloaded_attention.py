"""Attention over KV that passes through the device segment by segment, in plain torch: the truth for faster forms.

Knows tensors only, and what a batch calls its offloaded KV; how segments come to the device is decided elsewhere.

Shapes: T new tokens of one sequence, Hq query heads, Hkv key-value heads, G = Hq / Hkv, D head dimensions, L keys of a
segment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels.reference import QUERY_BLOCK, sigmoid

Gather = Callable[..., tuple[Tensor, Tensor]]
"""Keys and values [L, Hkv, D] float32 of some blocks: gather(*planes, blocks)."""


def offloaded_attention(
    q: Tensor,
    planes: tuple[Tensor, ...],
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    gather: Gather,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention` of q [T, Hq, D] where the sequence's first tokens are `batch.offloaded`."""
    assert batch.offloaded is not None and len(batch.query_lens) == 1
    (context,), (queries,) = batch.context_lens_list, batch.query_lens
    running = RunningAttention(q, planes[0].shape[2], context - queries, scale, window)
    for segment in batch.offloaded.segments():
        blocks = torch.arange(segment.planes[0].shape[0], device=q.device)
        keys, values = gather(*segment.planes, blocks)
        running.add(keys[: segment.tokens], values[: segment.tokens], segment.first)
    left = context - batch.offloaded.tokens
    keys, values = gather(*planes, batch.block_tables[0, : -(-left // batch.block_size)])
    running.add(keys[:left], values[:left], batch.offloaded.tokens)
    return running.result(sinks).to(q.dtype)


class RunningAttention:
    """Causal attention of T queries, the first at position `start`, over keys that come in any number of segments.

    Segments are joined with the online-softmax rule (arXiv 1805.02867; FlashAttention, arXiv 2205.14135), as FPDT does
    for chunks fetched from the host (arXiv 2408.16978).
    """

    def __init__(
        self, q: Tensor, kv_heads: int, start: int, scale: float, window: int | None, value_dim: int | None = None
    ):
        """`value_dim` is the width of values where it is not that of keys, D."""
        self.start = start
        self.window = window
        count, heads, dim = q.shape
        self.q_HGTD = (q.float() * scale).view(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        self.sum_HGTD = self.q_HGTD.new_zeros(*self.q_HGTD.shape[:3], dim if value_dim is None else value_dim)
        self.total_HGT = q.new_zeros(self.q_HGTD.shape[:3], dtype=torch.float32)
        self.top_HGT = torch.full_like(self.total_HGT, float("-inf"))

    def add(self, keys_LHD: Tensor, values_LHD: Tensor, first: int) -> None:
        """Join the keys at positions first, first + 1, ..."""
        for row in range(0, self.q_HGTD.shape[2], QUERY_BLOCK):
            if first >= self.start + row + QUERY_BLOCK:
                continue  # all of these keys come after all of these queries
            self._add(slice(row, row + QUERY_BLOCK), keys_LHD.permute(1, 2, 0), values_LHD.permute(1, 0, 2), first)

    def _add(self, rows: slice, keys_HDL: Tensor, values_HLD: Tensor, first: int) -> None:
        q_HGTD = self.q_HGTD[:, :, rows]
        heads, group, count, dim = q_HGTD.shape
        scores_HGTL = torch.bmm(q_HGTD.reshape(heads, group * count, dim), keys_HDL).view(heads, group, count, -1)
        positions_T1 = torch.arange(count, device=q_HGTD.device)[:, None] + (self.start + rows.start)
        positions_L = torch.arange(first, first + scores_HGTL.shape[-1], device=q_HGTD.device)
        hidden_TL = positions_L > positions_T1
        if self.window is not None:
            hidden_TL |= positions_L <= positions_T1 - self.window
        scores_HGTL = scores_HGTL.masked_fill_(hidden_TL, float("-inf"))
        before_HGT = self.top_HGT[:, :, rows]
        top_HGT = torch.maximum(before_HGT, scores_HGTL.amax(-1))
        base_HGT = top_HGT.masked_fill(top_HGT == float("-inf"), 0.0)  # nothing visible yet: weights of 0, not NaN
        keep_HGT = (before_HGT - base_HGT).exp()
        weights_HGTL = (scores_HGTL - base_HGT[..., None]).exp()
        part_HGTD = torch.bmm(weights_HGTL.flatten(1, 2), values_HLD).view(heads, group, count, -1)
        self.sum_HGTD[:, :, rows] = self.sum_HGTD[:, :, rows] * keep_HGT[..., None] + part_HGTD
        self.total_HGT[:, :, rows] = self.total_HGT[:, :, rows] * keep_HGT + weights_HGTL.sum(-1)
        self.top_HGT[:, :, rows] = top_HGT

    def result(self, sinks: Tensor | None = None) -> Tensor:
        """The attended values [T, Hq, D] float32; `sinks` [Hq] as in `reference.paged_attention`."""
        out_HGTD = self.sum_HGTD / self.total_HGT[..., None]
        if sinks is not None:  # of the whole softmax the keys have sigmoid(log of their sum - sink)
            sinks_HG1 = sinks.float().view(*self.top_HGT.shape[:2], 1)
            out_HGTD *= sigmoid(self.top_HGT + self.total_HGT.log() - sinks_HG1)[..., None]
        return out_HGTD.permute(2, 0, 1, 3).flatten(1, 2)
