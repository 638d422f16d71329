"""Which hidden states of a step go into the embeddings of its prompts, and what comes of them.

It reads plans and adds to the sequences' pooled states, to what they were before the step however often that is
computed; it decides nothing of it.

Shapes: R rows of the batch whose hidden states are wanted, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from serving.engine.plan import Work
from serving.messages import Pooling
from serving.sampling.pooling import PooledState
from serving.sampling.sampler import SamplingFailed


def pooled_rows(work: Sequence[Work]) -> list[range]:
    """The batch rows whose hidden states are wanted of each work item."""
    rows = []
    first = 0
    for item in work:
        end = first + item.count
        match item.seq.request.pooling:
            case Pooling.MEAN:
                rows.append(range(first, end))
            case Pooling.FIRST:
                rows.append(range(first, first + (item.seq.computed == 0)))
            case _:
                rows.append(range(end - item.completes, end))
        first = end
    return rows


def pool(work: Sequence[Work], rows: Sequence[range], hidden: Tensor) -> dict[int, bytes | SamplingFailed]:
    """The embeddings of the prompts that the step completes, by their place in the step; the others' states go on.

    `hidden` [R, H] float32 are those rows, one work item's after the other's.
    """
    values = hidden.cpu().numpy()
    found: dict[int, bytes | SamplingFailed] = {}
    first = 0
    for i, (item, span) in enumerate(zip(work, rows, strict=True)):
        seq = item.seq
        pooling = seq.request.pooling
        assert pooling is not None, "a batch of embeddings holds nothing else"
        before = PooledState(np.zeros(values.shape[1]), seq.computed) if seq.pooled is None else seq.pooled
        seq.pooled = before.at(seq.computed).added(values[first : first + len(span)], item.count)
        first += len(span)
        if item.completes:
            found[i] = seq.pooled.embedding(pooling)
    return found
