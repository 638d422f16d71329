"""Batches of steps in which sequences decode, on the CPU, in memory that stays where it is.

Decode steps follow one another with nearly the same sequences, each a token or a few further: what has not changed
since the step before is not written again. It knows numbers, and no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch

from serving.batch.ragged import RaggedBatch

SPARE_BLOCKS = 16  # of a table, so that a text grows for a while before there has to be other memory


class DecodeBatches:
    """Makes batches like `RaggedBatch.build`, all rows of which are returned; each is overwritten by the next.

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
        self._hold(block_tables)
        size = self.block_size
        slots = [table[start // size] * size + start % size for table, start in zip(block_tables, starts, strict=True)]
        contexts = [start + 1 for start in starts]
        self._tokens[:], self._positions[:], self._slots[:] = tokens, starts, slots
        self._context_lens[:] = self._contexts[:] = contexts
        return self._batch

    def of_several(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], block_tables: Sequence[list[int]]
    ) -> RaggedBatch:
        """`tokens[b]` are the new tokens of sequence b, the first at position `starts[b]`: few, as drafts are."""
        self._hold(block_tables)
        size = self.block_size
        lens = [len(new) for new in tokens]
        positions = [range(start, start + count) for start, count in zip(starts, lens, strict=True)]
        slots = [
            table[position // size] * size + position % size
            for table, new in zip(block_tables, positions, strict=True)
            for position in new
        ]
        contexts = [start + count for start, count in zip(starts, lens, strict=True)]
        return RaggedBatch(
            tokens=torch.tensor(list(chain.from_iterable(tokens))),
            positions=torch.tensor(list(chain.from_iterable(positions))),
            slots=torch.tensor(slots),
            query_start=torch.tensor([0, *accumulate(lens)], dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=self._batch.block_tables,
            block_size=size,
            query_lens=tuple(lens),
            context_lens_list=contexts,
            logits_rows=torch.arange(len(slots)),
        )

    def _hold(self, block_tables: Sequence[list[int]]) -> None:
        """The block tables of a batch, written where they are not there already."""
        longest = max(map(len, block_tables))
        if len(block_tables) != len(self._contexts) or longest > self._tables.shape[1]:
            self._make(len(block_tables), longest + SPARE_BLOCKS)
        if self._held != block_tables:
            self._write(block_tables)

    def _write(self, block_tables: Sequence[list[int]]) -> None:
        for i, (table, held) in enumerate(zip(block_tables, self._held, strict=True)):
            if table != held:
                row, count = self._tables[i], len(table)
                row[:count] = table
                row[count : len(held)] = 0
                self._held[i] = table.copy()
