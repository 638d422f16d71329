"""Where consecutive tokens of a sequence lie in paged planes: pure places, no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.memory.host_copy import Cells


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """`tokens` consecutive tokens of a sequence: from the `offset`-th place of the first of `blocks` on."""

    blocks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    offset: int
    tokens: int
    block_size: int

    def part(self, first: int, tokens: int) -> TokenSlots:
        """So many of them, from this one on."""
        start, size = self.offset + first, self.block_size
        blocks = self.blocks[start // size : -(-(start + tokens) // size)]
        return TokenSlots(blocks, start % size, tokens, size)

    def stretches(self, rows: Cells) -> Iterator[tuple[Any, Cells]]:
        """Where in cells, and which of the tokens' `rows`: in a first block that is not taken from its beginning, in
        blocks taken whole (an array of them, rows by block), in a last one."""
        head = min(self.block_size - self.offset, self.tokens) if self.offset else 0
        tail = (self.tokens - head) % self.block_size
        whole = self.blocks[int(head > 0) : len(self.blocks) - int(tail > 0)]
        if head:
            yield (self.blocks[0], slice(self.offset, self.offset + head)), rows[:head]
        if len(whole):
            between = rows[head : self.tokens - tail]
            yield whole, between.reshape(len(whole), self.block_size, *rows.shape[1:])
        if tail:
            yield (self.blocks[-1], slice(tail)), rows[-tail:]
