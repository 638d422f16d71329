"""The tensors that hold KV on the worker's device: per layer, one tensor a plane, [num_blocks, block_size, *shape].

It allocates, and copies token ranges out of and into blocks as bytes; who may do so is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    def slots(self, blocks: Sequence[int], start: int, end: int) -> TokenSlots:
        """Where the tokens start..end of a sequence with this block table lie. Raises IndexError beyond the table."""
        size = self.block_size
        first, last = start // size, -(-end // size)
        if not 0 <= start < end or last > len(blocks):
            raise IndexError(f"tokens {start} to {end} of a sequence with {len(blocks)} blocks of {size}")
        table = np.array(blocks[first:last], dtype=np.int64)
        assert table.min() >= 0 and table.max() < self.num_blocks, "a block that the pool does not have"
        return TokenSlots(table, start - first * size, end - start, size)

    def read(self, layer: int, slots: TokenSlots) -> list[Tensor]:
        """Copies of the layer's planes at these slots: uint8 [tokens, token_bytes] each, on the CPU."""
        parts = [
            torch.empty((slots.tokens, plane.token_bytes), dtype=torch.uint8) for plane in self.specs[layer].planes
        ]
        for plane, part in zip(self.planes[layer], parts, strict=True):
            _take(plane, slots, part.numpy().reshape(-1))
        return parts

    def read_into(self, layer: int, slots: TokenSlots, out: Bytes) -> None:
        """Copy the layer's planes at these slots, one after another, to `out`, uint8 [tokens * bytes of the layer]."""
        begin = 0
        for plane, spec in zip(self.planes[layer], self.specs[layer].planes, strict=True):
            end = begin + slots.tokens * spec.token_bytes
            _take(plane, slots, out[begin:end])
            begin = end

    def write(self, layer: int, slots: TokenSlots, parts: Sequence[Tensor | Bytes]) -> None:
        """The inverse of `read`; parts may be arrays as well."""
        for plane, part in zip(self.planes[layer], parts, strict=True):
            rows = np.ascontiguousarray(part)
            if plane.device.type == "cpu":
                _put(plane, slots, rows.reshape(-1))
                continue
            values = torch.from_numpy(rows.copy()).view(plane.dtype).view(slots.tokens, *plane.shape[2:])
            plane.flatten(0, 1).index_copy_(0, slots.index.to(plane.device), values.to(plane.device))


@dataclass(frozen=True, slots=True)
class TokenSlots:
    """`tokens` consecutive tokens of a sequence: from the `offset`-th place of the first of `blocks` on."""

    blocks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    offset: int
    tokens: int
    block_size: int

    @property
    def index(self) -> Tensor:
        """Each token's place in the pool: int64 [tokens]."""
        places = torch.from_numpy(self.blocks)[:, None] * self.block_size + torch.arange(self.block_size)
        return places.flatten()[self.offset : self.offset + self.tokens]

    def stretches(self) -> tuple[int, int, int]:
        """Tokens in a first block that is not taken from its beginning, in blocks taken whole, in a last one."""
        head = min(self.block_size - self.offset, self.tokens) if self.offset else 0
        tail = (self.tokens - head) % self.block_size
        return head, self.tokens - head - tail, tail


def _take(plane: Tensor, slots: TokenSlots, out: Bytes) -> None:
    """Copy the plane's rows at these slots to `out`, uint8 [tokens * bytes of a row]."""
    if plane.device.type != "cpu":
        rows = plane.flatten(0, 1)[slots.index.to(plane.device)].contiguous()
        out[:] = rows.view(slots.tokens, -1).view(torch.uint8).cpu().numpy().reshape(-1)
        return
    blocks, row = host_rows(plane, plane.shape[0]), len(out) // slots.tokens
    head, whole, tail = slots.stretches()
    if head:
        out[: head * row] = blocks[slots.blocks[0], slots.offset * row : (slots.offset + head) * row]
    if whole:
        first, end = int(head > 0), int(head > 0) + whole // slots.block_size
        middle = out[head * row : (head + whole) * row].reshape(end - first, -1)
        blocks.take(slots.blocks[first:end], axis=0, out=middle, mode="clip")  # to be "raise", it would copy twice
    if tail:
        out[-tail * row :] = blocks[slots.blocks[-1], : tail * row]


def _put(plane: Tensor, slots: TokenSlots, rows: Bytes) -> None:
    """The inverse of `_take`, in host memory."""
    blocks, row = host_rows(plane, plane.shape[0]), len(rows) // slots.tokens
    head, whole, tail = slots.stretches()
    if head:
        blocks[slots.blocks[0], slots.offset * row : (slots.offset + head) * row] = rows[: head * row]
    if whole:
        first, end = int(head > 0), int(head > 0) + whole // slots.block_size
        blocks[slots.blocks[first:end]] = rows[head * row : (head + whole) * row].reshape(end - first, -1)
    if tail:
        blocks[slots.blocks[-1], : tail * row] = rows[-tail * row :]


def host_rows(plane: Tensor, count: int) -> Bytes:
    """A plane in host memory as uint8 [count, bytes of a row], a row for each slot or block; no copy.

    numpy copies whole rows, with no threads but its own. torch copies number by number, which takes three times as
    long, and wakes threads that the model computes with.
    """
    rows: Bytes = plane.view(count, -1).view(torch.uint8).numpy()
    return rows


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
