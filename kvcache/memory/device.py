"""The tensors that hold KV on the worker's device: per layer, one tensor a plane, [num_blocks, block_size, *shape].

It allocates, and copies token ranges out of and into blocks as bytes; who may do so is decided elsewhere. A block of
float KV may hold INT8 instead, for a sequence whose decode worker keeps that: each row lies where a float one would.

    bfloat16  | d values, 2 bytes each                   |
    int8      | d values, a byte each | scale |  unused  |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.host_copy import Bytes, Cells, cells_of, shaped, take_blocks
from kvcache.memory.kv_dtype import stored_as
from serving.kvspec import AUTO, ITEM_BYTES, SCALE, LayerKV, Plane

_SCALE_BYTES = 4


class DeviceKV:
    """KV memory of one worker, described layer by layer by `specs`. `planes` are made, unless they are given."""

    def __init__(
        self,
        specs: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        planes: Sequence[tuple[Tensor, ...]] | None = None,
    ):
        self.specs = tuple(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        if planes is None:
            size, where = (num_blocks, block_size), torch.device(device)
            planes = [
                tuple(_zeros((*size, *plane.shape), plane.dtype, where) for plane in spec.planes) for spec in self.specs
            ]
        self.planes = list(planes)
        self._kept: dict[str, DeviceKV] = {AUTO: self}

    def kept_as(self, kv_dtype: str) -> DeviceKV:
        """The same blocks for sequences with KV of this dtype: AUTO is the blocks' own, `can_keep` tells the others."""
        if kv_dtype not in self._kept:
            specs = [stored_as(spec, kv_dtype) for spec in self.specs]
            layers = zip(self.specs, self.planes, specs, strict=True)
            within = [_within(spec, planes, target) for spec, planes, target in layers]
            self._kept[kv_dtype] = DeviceKV(specs, self.num_blocks, self.block_size, planes=within)
        return self._kept[kv_dtype]

    def can_keep(self, kv_dtype: str) -> bool:
        """True if blocks made for float KV can hold KV of this dtype."""
        return kv_dtype == "int8" and all(_has_room(spec, stored_as(spec, kv_dtype)) for spec in self.specs)

    def slots(self, blocks: Sequence[int], start: int, end: int) -> TokenSlots:
        """Where the tokens start..end of a sequence with this block table lie. Raises IndexError beyond the table."""
        size = self.block_size
        first, last = start // size, -(-end // size)
        if not 0 <= start < end or last > len(blocks):
            raise IndexError(f"tokens {start} to {end} of a sequence with {len(blocks)} blocks of {size}")
        table = np.array(blocks[first:last], dtype=np.int64)
        assert table.min() >= 0 and table.max() < self.num_blocks, "a block that does not exist"
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
        """Each token's slot in the paged planes: int64 [tokens]."""
        places = torch.from_numpy(self.blocks)[:, None] * self.block_size + torch.arange(self.block_size)
        return places.flatten()[self.offset : self.offset + self.tokens]

    def stretches(self, rows: Cells) -> Iterator[tuple[Any, Cells]]:
        """Where in cells, and which of the tokens' `rows`: in a first block that is not taken from its beginning, in
        blocks taken whole (an array of them, rows by block), in a last one."""
        head = min(self.block_size - self.offset, self.tokens) if self.offset else 0
        tail = (self.tokens - head) % self.block_size
        whole = self.blocks[int(head > 0) : len(self.blocks) - int(tail > 0)]
        if head:
            yield (self.blocks[0], slice(self.offset, self.offset + head)), rows[:head]
        if len(whole):
            between = rows[head : self.tokens - tail]
            yield whole, between.reshape(len(whole), self.block_size, *rows.shape[1:])
        if tail:
            yield (self.blocks[-1], slice(tail)), rows[-tail:]


def _take(plane: Tensor, slots: TokenSlots, out: Bytes) -> None:
    """Copy the plane's rows at these slots to `out`, uint8 [tokens * bytes of a row]."""
    if plane.device.type != "cpu":
        rows = plane.flatten(0, 1)[slots.index.to(plane.device)].contiguous()
        out[:] = rows.view(slots.tokens, -1).view(torch.uint8).cpu().numpy().reshape(-1)
        return
    cells = cells_of(plane)
    for where, into in slots.stretches(shaped(out, cells)):
        if isinstance(where, np.ndarray):
            take_blocks(cells, where, into)
        else:
            into[...] = cells[where]


def _put(plane: Tensor, slots: TokenSlots, rows: Bytes) -> None:
    """The inverse of `_take`, in host memory."""
    cells = cells_of(plane)
    for where, given in slots.stretches(shaped(rows, cells)):
        cells[where] = given


def _has_room(spec: LayerKV, target: LayerKV) -> bool:
    """True if each row of floats, the last axis of a plane, has the bytes for as many int8 numbers and their scale."""
    values = {plane.name: plane for plane in target.planes if plane.dtype == "int8"}
    return spec != target and all(
        plane.name in values
        and plane.shape[-1] % _SCALE_BYTES == 0
        and plane.shape[-1] + _SCALE_BYTES <= plane.shape[-1] * ITEM_BYTES[plane.dtype]
        for plane in spec.planes
    )


def _within(spec: LayerKV, planes: Sequence[Tensor], target: LayerKV) -> tuple[Tensor, ...]:
    """The target's planes, int8 and scales, as views of the spec's."""
    assert _has_room(spec, target), "asked without can_keep"
    rows = {plane.name: tensor for plane, tensor in zip(spec.planes, planes, strict=True)}

    def view(plane: Plane) -> Tensor:
        if plane.name in rows:
            return rows[plane.name].view(torch.int8)[..., : plane.shape[-1]]
        row = rows[plane.name.removesuffix(SCALE)]
        return row.view(torch.float32)[..., row.shape[-1] // _SCALE_BYTES]

    return tuple(view(plane) for plane in target.planes)


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """Zeros; in host memory they take up room only once they are written, so many blocks cost nothing to make."""
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
