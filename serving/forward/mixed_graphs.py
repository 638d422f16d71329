"""The sizes that steps with prompts or drafts among them are captured in, and the memory such a step is padded in.

Which tokens are whose, and how much each sequence sees, the kernels find on the device (serving.kernels.gpu.attention):
one graph serves whatever shares a step of its size, prompts, chunks of them, drafts and decodes.

Shapes: T new tokens of the step, padded to U; B sequences of it and R rows whose logits are wanted, both padded to N;
one more sequence owns the tokens that pad the step; M blocks of the longest table.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from serving.batch.ragged import RaggedBatch
from serving.forward.padding import TOKENS, reads_only_tensors, static

MixedSize = tuple[int, int, int]  # (sequences N, tokens of context, new tokens U)

STEP = 128  # new tokens between sizes
# New tokens of the largest: with more, the device takes longer to compute an 8B's layer than Python to launch it.
MOST = 512
FEWEST = 16  # sequences of the smallest; the next has four times as many


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSizes:
    """Which are captured: for each number of tokens, all of these. Ascending, and positive."""

    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    tokens: tuple[int, ...]

    @staticmethod
    def up_to(sequences: int, contexts: tuple[int, ...], tokens: int) -> MixedSizes:
        """Every 128 tokens up to 512; 16 sequences, 64, 256 and so on; and the limits themselves, where less."""
        most = min(tokens, MOST)
        ladder = [FEWEST << 2 * n for n in range(sequences.bit_length())]
        return MixedSizes(
            sequences=(*(n for n in ladder if n < sequences), sequences),
            contexts=contexts,
            tokens=(*range(STEP, most, STEP), most),
        )

    def fit(self, sequences: int, context: int, tokens: int) -> MixedSize | None:
        """The smallest size that holds so many sequences, this longest context and so many new tokens; None: none."""
        c = bisect_left(self.contexts, context)
        for most in self.tokens[bisect_left(self.tokens, tokens) :] if c < len(self.contexts) else ():
            for n in self._sequences(most):
                if n >= sequences:
                    return n, self.contexts[c], most
        return None

    def size_of(self, batch: RaggedBatch) -> MixedSize | None:
        """The size a step is replayed in; None for one that no graph computes, or with more logits than sequences."""
        if not reads_only_tensors(batch):
            return None
        rows = max(len(batch.query_lens), len(batch.logits_rows))
        return self.fit(rows, max(batch.context_lens_list), len(batch.tokens))

    def all(self) -> list[MixedSize]:
        """Largest first: the memory of a larger graph serves the smaller ones."""
        found = {(n, c, most) for most in self.tokens for n in self._sequences(most) for c in self.contexts}
        return sorted(found, key=lambda size: (size[2], size[0], size[1]), reverse=True)

    def static(self, block_size: int, device: torch.device | str) -> StaticMixed:
        return StaticMixed(self, block_size, device)

    def _sequences(self, tokens: int) -> list[int]:
        """Ascending. A step with no more tokens than sequences decodes, and two are left for one that has a prompt."""
        return sorted({min(n, tokens - 2) for n in self.sequences if tokens > 2})


class StaticMixed:
    """The tensors that captured steps read, at addresses that never change."""

    def __init__(self, sizes: MixedSizes, block_size: int, device: torch.device | str) -> None:
        n, width = sizes.sequences[-1], -(-sizes.contexts[-1] // block_size)
        self.block_size = block_size
        self.rows: dict[str, Any] = {
            name: static((sizes.tokens[-1],), pad, torch.int64, device) for name, pad in TOKENS.items()
        }
        self.logits_rows = static((n,), 0, torch.int64, device)
        self.context_lens = static((n + 1,), 0, torch.int32, device)
        self.query_start = static((n + 2,), 0, torch.int32, device)
        self.block_tables = static((n + 1, width), 0, torch.int32, device)

    def fill(self, batch: RaggedBatch, size: MixedSize) -> None:
        """Copy a step in: tokens from T on write no KV, and are queries of a sequence without context.

        The step must fit the size. Nothing here waits for the device.
        """
        n, context, most = size
        tokens, count, wanted = len(batch.tokens), len(batch.query_lens), len(batch.logits_rows)
        width = min(batch.block_tables.shape[1], -(-context // self.block_size))
        assert tokens <= most and max(count, wanted) <= n and max(batch.context_lens_list) <= context, size
        assert batch.block_size == self.block_size
        for name, rows in self.rows.items():
            rows[:tokens].copy_(getattr(batch, name))
            if tokens < most:
                rows[tokens:most].fill_(TOKENS[name])
        self.logits_rows[:wanted].copy_(batch.logits_rows)
        if wanted < n:
            self.logits_rows[wanted:n].fill_(0)
        self.context_lens[:count].copy_(batch.context_lens)
        self.context_lens[count : n + 1].fill_(0)
        self.block_tables[:count, :width].copy_(batch.block_tables[:, :width])
        self.query_start[: count + 1].copy_(batch.query_start)
        # Sequences from B on have no query; the one behind them all has those that pad the step.
        self.query_start[count + 1 : n + 1].fill_(tokens)
        self.query_start[n + 1 : n + 2].fill_(most)

    def clear(self, size: MixedSize) -> None:
        """Make all of a step of this size padding."""
        n, _, most = size
        for name, rows in self.rows.items():
            rows[:most].fill_(TOKENS[name])
        self.logits_rows[:n].fill_(0)
        self.context_lens[: n + 1].fill_(0)
        self.query_start[: n + 1].fill_(0)
        self.query_start[n + 1 : n + 2].fill_(most)

    def view(self, size: MixedSize) -> RaggedBatch:
        """The step a graph of this size is captured over: decodes and a prompt, of the longest context."""
        n, context, most = size
        return RaggedBatch(
            **{name: rows[:most] for name, rows in self.rows.items()},
            query_start=self.query_start[: n + 2],
            context_lens=self.context_lens[: n + 1],
            block_tables=self.block_tables[: n + 1, : -(-context // self.block_size)],
            block_size=self.block_size,
            query_lens=(*(1,) * n, most - n),
            context_lens_list=(*(context,) * n, 0),
            logits_rows=self.logits_rows[:n],
        )
