"""Earlier KV for tests of streamed attention: pieces copied from the very blocks that attention over all reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from serving.engine.batch import EarlierKV, Piece

JOINT = 128


class CopiedPieces(EarlierKV):
    """The first `tokens` tokens of a sequence with this block table, in pieces of so many tokens, for every layer.

    Pieces no query from position `start` on sees are left out where a layer has a window. All share one buffer, which
    is full of NaN once a piece is over.
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

    def pieces(self) -> Iterator[Piece]:
        planes, window = self.layers[self.layer], self.windows[self.layer]
        self.layer += 1
        size = planes[0].shape[1]
        seen = 0 if window is None else max(0, self.start - window + 1) // JOINT * JOINT
        for first in range(seen, self.tokens, self.each):
            end = min(first + self.each, self.tokens)
            blocks = self.table[first // size : end // size]
            copies = tuple(plane[blocks].reshape(-1, JOINT, *plane.shape[2:]) for plane in planes)
            yield Piece(copies, first, end - first)
            for plane in copies:
                plane.fill_(torch.nan if plane.is_floating_point() else -77)
