"""Whole blocks of device KV as bytes, and back: what the KV pool keeps of them.

A block has a part for each layer; a part is the layer's planes one after another, each token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from kvcache.memory.device import DeviceKV
from kvcache.memory.host_copy import cells_of
from kvcache.pool.block import PoolBlock, block_of


def part_bytes(device_kv: DeviceKV) -> list[int]:
    """Bytes of each part of a block."""
    return [spec.token_bytes * device_kv.block_size for spec in device_kv.specs]


def read_blocks(device_kv: DeviceKV, blocks: Sequence[int], keys: Sequence[bytes], namespace: str) -> list[PoolBlock]:
    """Copies of these blocks, one at least, under these keys, one for one, their digests computed."""
    slots = device_kv.slots(blocks, 0, len(blocks) * device_kv.block_size)
    sizes = part_bytes(device_kv)
    rows, start = np.empty((len(blocks), sum(sizes)), dtype=np.uint8), 0
    for plane in chain.from_iterable(device_kv.read_all(range(len(sizes)), slots)):
        end = start + plane.numel() // len(blocks)
        rows[:, start:end] = plane.numpy().reshape(len(blocks), -1)
        start = end
    return [block_of(key, namespace, sizes, row.data) for key, row in zip(keys, rows, strict=True)]


def write_part(device_kv: DeviceKV, layer: int, blocks: Sequence[int], payload: bytes | memoryview) -> None:
    """One layer of these blocks; `payload` is a part for each, in order, of the right size."""
    rows = np.frombuffer(payload, dtype=np.uint8).reshape(len(blocks), -1)
    if not device_kv.in_host_memory:
        slots = device_kv.slots(blocks, 0, len(blocks) * device_kv.block_size)
        widths = [plane.token_bytes * device_kv.block_size for plane in device_kv.specs[layer].planes]
        device_kv.write(layer, slots, np.split(rows, np.cumsum(widths)[:-1], axis=1))
        return
    start = 0
    for plane, spec in zip(device_kv.planes[layer], device_kv.specs[layer].planes, strict=True):
        width = spec.token_bytes * device_kv.block_size
        part = rows[:, start : start + width]
        cells = cells_of(plane)
        cells[list(blocks)] = part.view(cells.dtype).reshape(len(blocks), *cells.shape[1:])
        start += width
