"""What a step of several ranks is made of: parts of a batch, packed for another process, and word of its layers.

Shapes: T new tokens, R rows whose hidden states are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serving import kernels
from serving.batch.device_copy import all_on_device
from serving.batch.ragged import RaggedBatch
from serving.rank_group.messages import PackedBatch

TENSORS = ("tokens", "positions", "slots", "query_start", "context_lens", "block_tables", "logits_rows", "long_rope")


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some of a batch's sequences; the rows it gives are rows `places` [r] of the R that the whole batch gives."""

    batch: RaggedBatch
    places: Tensor


def part_of_batch(batch: RaggedBatch, chosen: Sequence[int]) -> BatchPart:
    """The sequences `chosen`, ascending and at least one, as a batch of their own."""
    attended, rows_t = kernels.part_of(batch, chosen)
    at = torch.searchsorted(rows_t, batch.logits_rows).clamp(max=len(rows_t) - 1)
    places = (rows_t[at] == batch.logits_rows).nonzero()[:, 0]
    part = replace(
        attended,
        tokens=batch.tokens[rows_t],
        positions=batch.positions[rows_t],
        slots=batch.slots[rows_t],
        logits_rows=at[places],
        long_rope=None if batch.long_rope is None else batch.long_rope[rows_t],
    )
    return BatchPart(part, places)


def arrived(batch: RaggedBatch, layers: int) -> RaggedBatch | None:
    """The batch once all `layers` of the prefix that it waits for have come; None where it leaves its barrier.

    Ranks wait for each other in every layer, so none begins such a step sooner.
    """
    if batch.barrier is None:
        return batch
    return replace(batch, barrier=None) if batch.barrier.passes(layers - 1) else None


class ToldLayers:
    """Tells of layers whose KV all ranks have written, each once and in order."""

    def __init__(self, layer_done: Callable[[int], None]) -> None:
        self._tell, self._told = layer_done, 0

    def upto(self, layers: int) -> None:
        """So many leading ones are written."""
        for layer in range(self._told, layers):
            self._tell(layer)
        self._told = max(self._told, layers)


def pack(batch: RaggedBatch) -> PackedBatch:
    """Of a batch that neither waits at a barrier nor has KV in host memory; one on a device has its `arrays`."""
    assert batch.barrier is None and batch.offloaded is None
    arrays = batch.arrays
    if arrays is None:
        tensors = {name: getattr(batch, name) for name in TENSORS}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
    return PackedBatch(arrays, batch.block_size, batch.query_lens, tuple(batch.context_lens_list))


def unpack(packed: PackedBatch, device: torch.device | str = "cpu") -> RaggedBatch:
    """The batch on this device."""
    arrays = [np.ascontiguousarray(array) for array in packed.arrays.values()]
    tensors: dict[str, Any] = dict(zip(packed.arrays, all_on_device(arrays, device), strict=True))
    return RaggedBatch(
        **tensors,
        block_size=packed.block_size,
        query_lens=packed.query_lens,
        context_lens_list=packed.context_lens_list,
    )
