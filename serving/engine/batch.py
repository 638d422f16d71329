"""One engine step's work as tensors: the new tokens of every scheduled sequence, concatenated, with no padding.

Built by the runner from a plan; the model reads it. Nothing here decides anything. A sequence whose oldest KV is not
on the device makes a batch of its own, with that KV as `earlier`.

Shapes: T new tokens in the step, B sequences, M blocks of the longest block table, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serving.engine.gate import Gate


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens' KV of one layer, on the device until the next piece is asked for."""

    planes: tuple[Tensor, ...]  # [n, tokens each, ...], in the order of the tokens
    first: int  # position of its first token, a multiple of 128
    tokens: int


class EarlierKV(Protocol):
    """The KV of a sequence's first tokens, passed through the device while a step computes."""

    tokens: int  # a multiple of 128, and of the block size

    def pieces(self) -> Iterator[Piece]:
        """What a layer's window sees of them, in order. Each layer asks once, first to last, and takes all of them."""
        ...


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
    context_lens_list: tuple[int, ...]  # the same as context_lens
    logits_rows: Tensor  # [R] int64, rows of T whose logits are wanted
    long_rope: Tensor | None = None  # [T] bool, LongRoPE's choice for each token's sequence; None: short everywhere
    earlier: EarlierKV | None = None  # of the only sequence: its row of block_tables begins after these tokens
    gate: Gate | None = None  # of the only sequence: where to wait for each layer's KV of the tokens before these

    @staticmethod
    def build(
        *,
        tokens: Seq[Seq[int]],
        starts: Seq[int],
        block_tables: Seq[Seq[int]],
        block_size: int,
        logits_rows: Seq[int] | None = None,
        long_rope: Seq[bool] | None = None,
        earlier: EarlierKV | None = None,
        gate: Gate | None = None,
        device: torch.device | str = "cpu",
    ) -> RaggedBatch:
        """`tokens[b]` are the new tokens of sequence b, the first at position `starts[b]`.

        `logits_rows` defaults to each sequence's last row. Block tables must cover every new token.
        """
        assert (earlier is None and gate is None) or len(tokens) == 1
        absent = 0 if earlier is None else earlier.tokens // block_size  # blocks before those of the table
        lens = [len(new) for new in tokens]
        query_start = [0]
        for n in lens:
            query_start.append(query_start[-1] + n)
        positions = [p for start, n in zip(starts, lens, strict=True) for p in range(start, start + n)]
        slots = [
            table[p // block_size - absent] * block_size + p % block_size
            for start, n, table in zip(starts, lens, block_tables, strict=True)
            for p in range(start, start + n)
        ]
        context = tuple(start + n for start, n in zip(starts, lens, strict=True))
        width = max((len(table) for table in block_tables), default=0)
        padded = [list(table) + [0] * (width - len(table)) for table in block_tables]
        rows = [end - 1 for end in query_start[1:]] if logits_rows is None else list(logits_rows)
        per_token_rope = None
        if long_rope is not None and any(long_rope):
            flags = [flag for flag, n in zip(long_rope, lens, strict=True) for _ in range(n)]
            per_token_rope = torch.tensor(flags, dtype=torch.bool, device=device)
        return RaggedBatch(
            tokens=torch.tensor([t for new in tokens for t in new], dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
            context_lens=torch.tensor(context, dtype=torch.int32, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).view(len(lens), width),
            block_size=block_size,
            query_lens=tuple(lens),
            context_lens_list=context,
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
            long_rope=per_token_rope,
            earlier=earlier,
            gate=gate,
        )
