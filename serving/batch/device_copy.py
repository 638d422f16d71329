"""Numbers of a step onto its device. On CUDA nothing here waits: they go through pinned memory, in stream order.

Pinned memory that a copy is still reading is not handed out again: torch's allocator of it sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes: Triton compiles a kernel anew for pointers that are multiples of 16 and for those that are not


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A list of numbers as a tensor [len(values)]."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def all_on_device(arrays: Sequence[NDArray[Any]], device: torch.device | str) -> list[Tensor]:
    """Contiguous arrays as tensors of their shapes and types: in one copy, or where they lie if that is the CPU."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    pinned = torch.device(device).type == "cuda"
    return unpacked(packed(arrays, pinned=pinned).to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[NDArray[Any]], *, pinned: bool) -> Tensor:
    """The arrays' bytes in one tensor on the CPU, each from a multiple of ALIGNMENT on."""
    room = torch.empty(sum(_room(array) for array in arrays), dtype=torch.uint8, pin_memory=pinned)
    flat, at = room.numpy(), 0
    for array in arrays:
        flat[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += _room(array)
    return room


def unpacked(room: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Views of what `packed` has made of the arrays, wherever that was copied to."""
    views, at = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array[:0]).dtype
        views.append(room[at : at + array.nbytes].view(dtype).view(array.shape))
        at += _room(array)
    return views


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
