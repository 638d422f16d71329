"""Batches of steps in which each sequence decodes one token, on the CPU, in memory that stays where it is.

Decode steps follow one another with nearly the same sequences, each one token further: what has not changed since the
step before is not written again. It knows numbers, and no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from serving.batch.ragged import RaggedBatch

SPARE_BLOCKS = 16  # of a table, so that a text grows for a while before there has to be other memory


class DecodeBatches:
    """Makes batches like `RaggedBatch.build`, of a token a sequence; each is overwritten when the next is made.

    Block tables may have more columns of padding than the longest needs.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._make(0, 0)

    def _make(self, sequences: int, blocks: int) -> None:
        self._tokens, self._positions, self._slots = (np.zeros(sequences, dtype=np.int64) for _ in range(3))
        self._context_lens = np.zeros(sequences, dtype=np.int32)
        self._tables = np.zeros((sequences, blocks), dtype=np.int32)
        self._contexts = [0] * sequences
        self._held: list[list[int]] = [[] for _ in range(sequences)]  # what the rows of `_tables` begin with
        self._batch = RaggedBatch(
            tokens=torch.from_numpy(self._tokens),
            positions=torch.from_numpy(self._positions),
            slots=torch.from_numpy(self._slots),
            query_start=torch.arange(sequences + 1, dtype=torch.int32),
            context_lens=torch.from_numpy(self._context_lens),
            block_tables=torch.from_numpy(self._tables),
            block_size=self.block_size,
            query_lens=(1,) * sequences,
            context_lens_list=self._contexts,
            logits_rows=torch.arange(sequences),
        )

    def of(self, tokens: Sequence[int], starts: Sequence[int], block_tables: Sequence[list[int]]) -> RaggedBatch:
        """`tokens[b]` is the only new token of sequence b, at position `starts[b]`. Tables must cover them."""
        longest = max(map(len, block_tables))
        if len(tokens) != len(self._contexts) or longest > self._tables.shape[1]:
            self._make(len(tokens), longest + SPARE_BLOCKS)
        if self._held != block_tables:
            self._write(block_tables)
        size = self.block_size
        slots = [table[start // size] * size + start % size for table, start in zip(block_tables, starts, strict=True)]
        contexts = [start + 1 for start in starts]
        self._tokens[:], self._positions[:], self._slots[:] = tokens, starts, slots
        self._context_lens[:] = self._contexts[:] = contexts
        return self._batch

    def _write(self, block_tables: Sequence[list[int]]) -> None:
        for i, (table, held) in enumerate(zip(block_tables, self._held, strict=True)):
            if table != held:
                row, count = self._tables[i], len(table)
                row[:count] = table
                row[count : len(held)] = 0
                self._held[i] = table.copy()
