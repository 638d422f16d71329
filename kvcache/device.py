"""The tensors that hold KV on the worker's device: per layer, one tensor a plane, [num_blocks, block_size, *shape].

It allocates, and copies token ranges out of and into blocks as bytes; who may do so is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from serving.kvspec import LayerKV

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class DevicePool:
    """KV memory of one worker, described layer by layer by `specs`."""

    def __init__(self, specs: Sequence[LayerKV], num_blocks: int, block_size: int, device: torch.device | str = "cpu"):
        self.specs = tuple(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.planes: list[tuple[Tensor, ...]] = [
            tuple(
                _zeros((num_blocks, block_size, *plane.shape), plane.dtype, torch.device(device))
                for plane in spec.planes
            )
            for spec in self.specs
        ]

    def slots(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """Where the tokens start..end of a sequence with this block table lie: int64 [end - start]."""
        positions = torch.arange(start, end)
        return torch.tensor(blocks)[positions // self.block_size] * self.block_size + positions % self.block_size

    def read(self, layer: int, slots: Tensor) -> list[Tensor]:
        """Copies of the layer's planes at these slots: uint8 [tokens, token_bytes] each, on the CPU."""
        return [_taken(plane, slots) for plane in self.planes[layer]]

    def write(self, layer: int, slots: Tensor, parts: Sequence[Tensor]) -> None:
        """The inverse of `read`."""
        for plane, part in zip(self.planes[layer], parts, strict=True):
            if plane.device.type == "cpu":
                _slot_rows(plane)[slots.numpy()] = part.numpy()
                continue
            if part.storage_offset() % plane.element_size():
                part = part.clone()  # a view of another type must begin where that type may
            rows = part.view(plane.dtype).view(len(slots), *plane.shape[2:])
            plane.flatten(0, 1).index_copy_(0, slots.to(plane.device), rows.to(plane.device))


def _taken(plane: Tensor, slots: Tensor) -> Tensor:
    """The plane's rows at these slots, uint8 [tokens, token_bytes]."""
    if plane.device.type == "cpu":
        return torch.from_numpy(_slot_rows(plane).take(slots.numpy(), axis=0))
    return plane.flatten(0, 1)[slots].contiguous().view(len(slots), -1).view(torch.uint8).cpu()


def host_rows(plane: Tensor, count: int) -> Bytes:
    """A plane in host memory as uint8 [count, bytes of a row], a row for each slot or block; no copy.

    numpy copies whole rows, with no threads but its own. torch copies number by number, which takes three times as
    long, and wakes threads that the model computes with.
    """
    rows: Bytes = plane.view(count, -1).view(torch.uint8).numpy()
    return rows


def _slot_rows(plane: Tensor) -> Bytes:
    return host_rows(plane, plane.shape[0] * plane.shape[1])


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """Zeros; in host memory they take up room only once they are written, so a large pool costs nothing to make."""
    kind: torch.dtype = getattr(torch, dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=kind, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * kind.itemsize, dtype=np.uint8)).view(kind).view(shape)


def token_bytes(specs: Sequence[LayerKV]) -> int:
    """Bytes of KV one token takes over all layers."""
    return sum(spec.token_bytes for spec in specs)


def blocks_in(memory_bytes: int, specs: Sequence[LayerKV], block_size: int) -> int:
    """How many blocks fit into this much memory."""
    return memory_bytes // (token_bytes(specs) * block_size)
