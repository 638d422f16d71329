"""Kernels of a FakeCuda that write KV and draw by all KV a token sees, found as attention finds it.

A token is drawn by the tokens before it, each times its place: any that is missing, moved or another sequence's shows.

Shapes: U tokens of the batch, N sequences, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.forward.layer_events import LayerDone
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.late_forward import VOCAB, kv_of


def next_token(tokens: Sequence[int]) -> int:
    """What follows a text."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) * 31 + 7) % VOCAB


class PagedKernels:
    """As much of serving.kernels.gpu.decoder.TritonDecoder as a forward pass asks for."""

    ranks = None  # there are no others

    def __init__(self, cuda: FakeCuda, device_kv: DeviceKV) -> None:
        self.cuda = cuda
        self.planes = device_kv.planes
        self.block_size = device_kv.block_size

    def tune(self, most_rows: int) -> None:
        """There is nothing to choose."""

    def logits(self, batch: RaggedBatch, *, angles: None = None, written: LayerDone | None = None) -> Tensor:
        """1 [R, V] for what is drawn, 0 for all else."""
        for layer, planes in enumerate(self.planes):
            for plane in planes:
                self.cuda.launch(self._writes(layer), plane, batch.tokens, batch.positions, batch.slots)
            if written is not None:
                written(layer)
        rows = len(batch.logits_rows)
        scores = self.cuda.room(4 * rows * VOCAB).view(torch.float32).view(rows, VOCAB)
        seen = batch.query_start, batch.context_lens, batch.block_tables, batch.logits_rows, batch.tokens
        self.cuda.launch(self._draw, scores, self.planes[0][0], *seen)
        return scores

    def _writes(self, layer: int) -> object:
        def write(plane: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
            flat = plane.view(-1, 2)
            for token, position, slot in zip(tokens.tolist(), positions.tolist(), slots.tolist(), strict=True):
                if slot >= 0:
                    flat[slot] = torch.tensor(kv_of(token, position, layer))

        return write

    def _draw(
        self,
        scores: Tensor,
        plane: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        logits_rows: Tensor,
        tokens: Tensor,
    ) -> None:
        starts, flat = query_start.tolist(), plane.view(-1, 2)
        assert starts == sorted(starts) and starts[-1] == len(tokens), "every token is some sequence's"
        for row, at in enumerate(logits_rows.tolist()):
            owner = max(b for b in range(len(starts) - 1) if starts[b] <= at)
            sees = int(context_lens[owner]) - (starts[owner + 1] - 1 - at)
            table = block_tables[owner].tolist()
            slots = [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(max(0, sees))]
            scores[row] = 0.0
            scores[row, next_token([int(token) for token in flat[slots, 0].tolist()])] = 1.0
