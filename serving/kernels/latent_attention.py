"""Attention over the latent KV of MLA, in plain torch: the truth for faster forms (DeepSeek-V2, arXiv 2405.04434).

A layer's planes are c [num_blocks, block_size, L] and r [num_blocks, block_size, R], with scales [num_blocks,
block_size] for each where they are int8. They are read as keys and values of a single head.

Shapes: T new tokens in the step, H heads, L elements of the latent, R of the rotated key, N of a key beside it, V of a
value, C tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.kernels import int8, reference
from serving.kernels.offloaded_attention import RunningAttention

SEGMENT = 512  # tokens of context whose keys and values are expanded at a time: bounds what they take

Planes = tuple[Tensor, ...]
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Keys [C, H, N] and values [C, H, V] float32 of latents [C, L]."""


_BY_PLANES: dict[int, Any] = {2: reference, 4: int8}


class _Keys(NamedTuple):
    """How latents [C, L] and rotated keys [C, R] become keys [C, heads, ...] and values [C, heads, width]."""

    heads: int
    width: int
    made: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def write_latent(c: Tensor, r: Tensor, planes: Planes, slots: Tensor) -> None:
    """Store latents c [T, L] and rotated keys r [T, R] at `slots` [T] of a layer's planes."""
    _BY_PLANES[len(planes)].write_kv(c[:, None], r[:, None], *_one_head(planes), slots)


def gather_latent(planes: Planes, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [C, L] and rotated keys [C, R], float32, of the tokens of these blocks, one after another."""
    c, r = _BY_PLANES[len(planes)].gather(*_one_head(planes), blocks)
    return c[:, 0], r[:, 0]


def absorbed_attention(q: Tensor, planes: Planes, batch: RaggedBatch, scale: float) -> Tensor:
    """Attended latents [T, H, L] float32 for queries q [T, H, L + R] that are in the latent's space already."""
    rank = planes[0].shape[2]
    if batch.offloaded is not None:
        keys = _Keys(1, rank, lambda c, r: (torch.cat((c, r), -1)[:, None], c[:, None]))
        return _attend(q, planes, batch, scale, keys)
    used, tables = torch.unique(batch.block_tables, return_inverse=True)
    c, r = gather_latent(planes, used)
    plane = torch.cat((c, r), -1).view(len(used), batch.block_size, 1, -1)
    part = replace(batch, block_tables=tables)
    return reference.paged_attention(q.float(), plane, plane[..., :rank], part, scale, None)


def expanded_attention(
    q: Tensor, planes: Planes, batch: RaggedBatch, scale: float, expand: Expand, width: int
) -> Tensor:
    """Attended values [T, H, V = width] float32 for queries q [T, H, N + R], over keys and values made of latents."""

    def made(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(c)
        return torch.cat((keys, r[:, None].expand(-1, keys.shape[1], -1)), -1), values

    return _attend(q, planes, batch, scale, _Keys(q.shape[1], width, made))


def part_of(batch: RaggedBatch, chosen: Sequence[int]) -> tuple[RaggedBatch, Tensor]:
    """The batch of the sequences `chosen` alone, as attention reads it, and its rows [T] of the whole batch."""
    starts, device = [0, *accumulate(batch.query_lens)], batch.tokens.device
    rows = [torch.arange(starts[one], starts[one + 1], device=device) for one in chosen]
    lens = tuple(batch.query_lens[one] for one in chosen)
    part = replace(
        batch,
        query_start=torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device),
        query_lens=lens,
        context_lens=batch.context_lens[list(chosen)],
        context_lens_list=tuple(batch.context_lens_list[one] for one in chosen),
        block_tables=batch.block_tables[list(chosen)],
    )
    return part, torch.cat(rows)


def _attend(q: Tensor, planes: Planes, batch: RaggedBatch, scale: float, keys: _Keys) -> Tensor:
    """Each sequence over segments of its context, joined one after the other; [T, H, width] float32."""
    parts, row = [], 0
    for queries, context, table in zip(batch.query_lens, batch.context_lens_list, batch.block_tables, strict=True):
        running = RunningAttention(
            q[row : row + queries], keys.heads, context - queries, scale, None, value_dim=keys.width
        )
        first = 0
        if batch.offloaded is not None:
            first = batch.offloaded.tokens
            for segment in batch.offloaded.segments():
                c, r = gather_latent(segment.planes, torch.arange(segment.planes[0].shape[0], device=q.device))
                running.add(*keys.made(c[: segment.tokens], r[: segment.tokens]), segment.first)
        step = max(SEGMENT // batch.block_size, 1)
        for block in range(0, -(-(context - first) // batch.block_size), step):
            start = first + block * batch.block_size
            c, r = gather_latent(planes, table[block : block + step])
            running.add(*keys.made(c[: context - start], r[: context - start]), start)
        parts.append(running.result())
        row += queries
    return torch.cat(parts)


def _one_head(planes: Planes) -> Planes:
    return tuple(plane.unsqueeze(2) for plane in planes)
