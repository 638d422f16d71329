"""Earlier KV for tests of streamed attention: segments copied from the very blocks that attention over all reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from serving.batch.ragged import KVSegment, OffloadedKV

JOINT = 128


class CopiedSegments(OffloadedKV):
    """The first `tokens` tokens of a sequence with this block table, in segments of so many tokens, for every layer.

    Segments no query from position `start` on sees are left out where a layer has a window. All share one buffer, which
    is full of NaN once a segment is over.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, ...]],
        table: Sequence[int],
        tokens: int,
        each: int,
        *,
        start: int = 0,
        windows: Sequence[int | None] | None = None,
    ):
        self.layers = layers
        self.table = torch.tensor(table)
        self.tokens = tokens
        self.each = each
        self.start = start
        self.windows = windows or [None] * len(layers)
        self.layer = 0
        assert tokens % JOINT == 0 == each % JOINT

    def segments(self) -> Iterator[KVSegment]:
        planes, window = self.layers[self.layer], self.windows[self.layer]
        self.layer += 1
        size = planes[0].shape[1]
        seen = 0 if window is None else max(0, self.start - window + 1) // JOINT * JOINT
        for first in range(seen, self.tokens, self.each):
            end = min(first + self.each, self.tokens)
            blocks = self.table[first // size : end // size]
            copies = tuple(plane[blocks].reshape(-1, JOINT, *plane.shape[2:]) for plane in planes)
            yield KVSegment(copies, first, end - first)
            for plane in copies:
                plane.fill_(torch.nan if plane.is_floating_point() else -77)
