"""Whole blocks of device KV as bytes, and back: what the KV pool keeps of them.

A block has a part for each layer; a part is the layer's planes one after another, each token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from kvcache.memory.host_copy import Bytes, cells_of, take_blocks
from kvcache.pool.block import PoolBlock, block_of


def part_bytes(device_kv: DeviceKV) -> list[int]:
    """Bytes of each part of a block."""
    return [spec.token_bytes * device_kv.block_size for spec in device_kv.specs]


def read_blocks(device_kv: DeviceKV, blocks: Sequence[int], keys: Sequence[bytes], namespace: str) -> list[PoolBlock]:
    """Copies of these blocks under these keys, one for one, their digests computed."""
    sizes = part_bytes(device_kv)
    rows = _rows(device_kv, blocks, sum(sizes))
    return [block_of(key, namespace, sizes, row.data) for key, row in zip(keys, rows, strict=True)]


def _rows(device_kv: DeviceKV, blocks: Sequence[int], size: int) -> Bytes:
    """The bytes of each block."""
    made, start = np.empty((len(blocks), size), dtype=np.uint8), 0
    for plane in (plane for planes in device_kv.planes for plane in planes):
        taken = _taken(plane, blocks)
        end = start + taken.shape[1]
        made[:, start:end] = taken
        start = end
    return made


def write_part(device_kv: DeviceKV, layer: int, blocks: Sequence[int], payload: bytes | memoryview) -> None:
    """One layer of these blocks; `payload` is a part for each, in order, of the right size."""
    rows = np.frombuffer(payload, dtype=np.uint8).reshape(len(blocks), -1)
    start = 0
    for plane, spec in zip(device_kv.planes[layer], device_kv.specs[layer].planes, strict=True):
        width = spec.token_bytes * device_kv.block_size
        piece = rows[:, start : start + width]
        if plane.device.type == "cpu":
            cells = cells_of(plane)
            cells[list(blocks)] = piece.view(cells.dtype).reshape(len(blocks), *cells.shape[1:])
        else:
            values = torch.from_numpy(piece.copy()).view(plane.dtype).view(len(blocks), *plane.shape[1:])
            plane.index_copy_(0, torch.tensor(blocks, device=plane.device), values.to(plane.device))
        start += width


def _taken(plane: Tensor, blocks: Sequence[int]) -> Bytes:
    """Copies of these blocks of a plane, uint8 [blocks, bytes of a block]."""
    if plane.device.type == "cpu":
        cells = cells_of(plane)
        out = np.empty((len(blocks), *cells.shape[1:]), dtype=cells.dtype)
        take_blocks(cells, list(blocks), out)
        return out.view(np.uint8).reshape(len(blocks), cells[0].nbytes)
    chosen = plane[torch.tensor(blocks, device=plane.device)]
    taken: Bytes = chosen.reshape(len(blocks), -1).view(torch.uint8).cpu().numpy()
    return taken
