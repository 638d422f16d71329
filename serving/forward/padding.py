"""Which steps can be padded to a captured size, what the rows that pad them hold, and memory for them at addresses that
never change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.batch.ragged import RaggedBatch
from serving.streams import streams_of

PADDING_SLOT = -1  # a row with this slot writes no KV
TOKENS = {"tokens": 0, "positions": 0, "slots": PADDING_SLOT}  # of a token that pads a step; int64


def reads_only_tensors(batch: RaggedBatch) -> bool:
    """True for a step that a graph can be given as tensors, over KV of the device that is there when it begins."""
    return batch.long_rope is None and batch.barrier is None and batch.offloaded is None


def static(shape: tuple[int, ...], value: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of the device full of `value`."""
    room = streams_of(device).room(torch.Size(shape).numel() * dtype.itemsize)
    return room.view(dtype).view(shape).fill_(value)
