"""One engine step's work as tensors: the new tokens of every scheduled sequence, concatenated, with no padding.

Built by the runner from a step plan; the model reads it. Nothing here decides anything. A sequence whose oldest KV is
not on the device makes a batch of its own, with that KV as `offloaded`.

Shapes: T new tokens in the step, B sequences, M blocks of the longest block table, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.batch.device_copy import all_on_device
from serving.batch.layer_barrier import LayerBarrier


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Consecutive tokens' KV of one layer, on the device until the next segment is asked for."""

    planes: tuple[Tensor, ...]  # [n, tokens each, ...], in the order of the tokens
    first: int  # position of its first token, a multiple of 128
    tokens: int


class OffloadedKV(Protocol):
    """The KV of a sequence's first tokens, passed through the device while a step computes."""

    tokens: int  # a multiple of 128, and of the block size

    def segments(self) -> Iterator[KVSegment]:
        """What a layer's window sees of them, in order. Each layer asks once, first to last, and takes all of them."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0-based position of each token in its sequence
    slots: Tensor  # [T] int64, where each token's KV goes: block id * block_size + offset
    query_start: Tensor  # [B + 1] int32, sequence b owns rows query_start[b]:query_start[b + 1]
    context_lens: Tensor  # [B] int32, tokens of the sequence in KV once this step's are written
    block_tables: Tensor  # [B, M] int32, rows padded with 0
    block_size: int  # tokens a block
    query_lens: tuple[int, ...]  # B values, as Python ints for per-sequence loops
    context_lens_list: Sequence[int]  # the same as context_lens
    logits_rows: Tensor  # [R] int64, rows of T whose logits are wanted, each once and in order
    long_rope: Tensor | None = None  # [T] bool, LongRoPE's choice for each token's sequence; None: short everywhere
    offloaded: OffloadedKV | None = None  # of the only sequence: its row of block_tables begins after these tokens
    barrier: LayerBarrier | None = None  # of the only sequence: opens as KV of the tokens before these is written
    arrays: Mapping[str, NDArray[Any]] | None = None  # all tensors as they were built, where those are on a device

    @staticmethod
    def build(
        *,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        logits_rows: Sequence[int] | None = None,
        long_rope: Sequence[bool] | None = None,
        offloaded: OffloadedKV | None = None,
        barrier: LayerBarrier | None = None,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """`tokens[b]` are the new tokens of sequence b, the first at position `starts[b]`.

        `logits_rows` defaults to each sequence's last row. Block tables must cover every new token. On CUDA nothing
        waits for the device: all of it goes there in one copy.
        """
        assert (offloaded is None and barrier is None) or len(tokens) == 1
        absent = 0 if offloaded is None else offloaded.tokens // block_size  # blocks before those of the table
        lens = [len(new) for new in tokens]
        context = tuple(start + n for start, n in zip(starts, lens, strict=True))
        held = [block_size * (absent + len(table)) for table in block_tables]
        assert all(end <= room for end, room in zip(context, held, strict=True)), "a block table ends too soon"
        query_start = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_start[1:])
        total = int(query_start[-1])
        positions = np.arange(total, dtype=np.int64)
        positions += np.repeat(np.array(starts, dtype=np.int64) - query_start[:-1], lens)
        tables = _padded(block_tables)
        numbers, offsets = np.divmod(positions, block_size)
        owners = np.repeat(np.arange(len(lens)), lens)
        blocks = tables[owners, numbers - absent].astype(np.int64)
        rows = query_start[1:] - 1 if logits_rows is None else list(logits_rows)
        arrays = {
            "tokens": np.fromiter(chain.from_iterable(tokens), np.int64, total),
            "positions": positions,
            "slots": blocks * block_size + offsets,
            "query_start": query_start,
            "context_lens": np.array(context, dtype=np.int32),
            "block_tables": tables,
            "logits_rows": np.array(rows, dtype=np.int64),
        }
        if long_rope is not None and any(long_rope):
            arrays["long_rope"] = np.repeat(np.array(long_rope, dtype=np.bool_), lens)
        return RaggedBatch(
            **dict(zip(arrays, all_on_device(list(arrays.values()), device), strict=True)),
            arrays=None if torch.device(device).type == "cpu" else arrays,
            block_size=block_size,
            query_lens=tuple(lens),
            context_lens_list=context,
            offloaded=offloaded,
            barrier=barrier,
        )


def _padded(tables: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Rows of block ids, [B, M] of the longest of them, padded with 0."""
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
