"""A sequence's embedding as it comes together, chunk by chunk: the pooled hidden states so far.

What is kept is one row. It is added to in float64 row by row, so that an embedding has the same bits however its prompt
was cut into steps. It knows neither batches nor sequences.

Shapes: H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.messages import Pooling
from serving.sampling.sampler import SamplingFailed

NOT_NUMBERS = "the model returned hidden states that are not numbers"


@dataclass(frozen=True, slots=True)
class PooledState:
    """`sum` [H] float64 of the hidden states that count, of the `tokens` computed so far; and what it was `before`."""

    sum: NDArray[np.float64]
    tokens: int = 0
    before: PooledState | None = None

    def at(self, tokens: int) -> PooledState:
        """What it was of so many tokens: a step that is repeated adds to that. Raises ValueError for any other time."""
        for state in (self, self.before):
            if state is not None and state.tokens == tokens:
                return state
        raise ValueError(f"the pooled state of {tokens} tokens is not kept")

    def added(self, rows: NDArray[np.float32], tokens: int) -> PooledState:
        """With a chunk of so many tokens, and the rows [n, H] of it that count."""
        total = self.sum
        if len(rows):
            # numpy reduces the outer axis row after row: the sum so far goes first.
            total = np.add.reduce(np.concatenate((total[None], rows)), axis=0)
        return PooledState(total, self.tokens + tokens, PooledState(self.sum, self.tokens))

    def embedding(self, pooling: Pooling) -> bytes | SamplingFailed:
        """The whole prompt's as little-endian float32."""
        pooled = self.sum / self.tokens if pooling is Pooling.MEAN else self.sum
        if not np.isfinite(pooled).all():
            return SamplingFailed(NOT_NUMBERS)
        return pooled.astype("<f4").tobytes()
