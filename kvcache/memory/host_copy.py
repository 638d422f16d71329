"""Planes of KV in host memory, copied by numpy: whole blocks at once, in runs of bytes that lie side by side.

numpy copies runs, with no threads but its own. torch copies number by number, which takes three times as long, and
wakes threads that the model computes with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Cells = np.ndarray[tuple[int, ...], np.dtype[Any]]
Blocks = Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def cells_of(plane: Tensor) -> Cells:
    """A plane [num_blocks, block_size, ...] as [num_blocks, block_size, runs]; no copy.

    A run has all of a token's bytes, or those of its last axis in a plane that lies within a wider one.
    """
    count, size = plane.shape[:2]
    if plane.is_contiguous():
        return _runs(plane.view(count, size, -1)).reshape(count, size, 1)
    if plane.stride(-1) == 1:
        return _runs(plane.view(count, size, -1, plane.shape[-1])).reshape(count, size, -1)
    return plane.view(count, size, -1).numpy().view(f"V{plane.itemsize}")


def _runs(rows: Tensor) -> Cells:
    """[..., 1] of runs as long as the last axis, whose numbers lie side by side."""
    width = rows.shape[-1] * rows.itemsize
    return rows.view(torch.uint8).numpy().view(f"V{width}")


def shaped(data: Bytes, cells: Cells) -> Cells:
    """Bytes [tokens or blocks, bytes of one], each one's side by side, as the runs of `cells`: [..., runs]; no copy."""
    return data.view(cells.dtype).reshape(-1, *cells.shape[2:])


def take_blocks(cells: Cells, blocks: Blocks, out: Cells) -> None:
    """Copy these blocks to `out` [blocks, block_size, runs]."""
    if cells.flags.c_contiguous:
        cells.take(blocks, axis=0, out=out, mode="clip")  # to be "raise", it would copy twice
    else:
        out[...] = cells[blocks]  # `take` would first copy all of the plane
