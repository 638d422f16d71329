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

from serving.streams import IMMEDIATE, Streams, streams_of

ALIGNMENT = 64  # bytes: Triton compiles a kernel anew for pointers that are multiples of 16 and for those that are not


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A list of numbers as a tensor [len(values)]."""
    host = torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    streams = streams_of(device)
    room = streams.pinned(host.nbytes).view(dtype)
    return streams.uploaded(room.copy_(host))


def all_on_device(arrays: Sequence[NDArray[Any]], device: torch.device | str) -> list[Tensor]:
    """Contiguous arrays as tensors of their shapes and types: in one copy, or where they lie if that is the CPU."""
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    streams = streams_of(device)
    packed = pack(arrays, streams)
    there = packed.to(device) if streams is IMMEDIATE else streams.uploaded(packed)
    return unpacked(there, arrays)


def pack(arrays: Sequence[NDArray[Any]], streams: Streams) -> Tensor:
    """The arrays' bytes in one tensor on the CPU, each from a multiple of ALIGNMENT on."""
    room = streams.pinned(sum(_room(array) for array in arrays))
    flat, at = room.numpy(), 0
    for array in arrays:
        flat[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += _room(array)
    return room


def unpacked(room: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Views of what `pack` has made of the arrays, wherever that was copied to."""
    views, at = [], 0
    for array in arrays:
        dtype = torch.from_numpy(array[:0]).dtype
        views.append(room[at : at + array.nbytes].view(dtype).view(array.shape))
        at += _room(array)
    return views


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT
