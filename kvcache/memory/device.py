"""The tensors that hold KV on the worker's device: per layer, one tensor a plane, [num_blocks, block_size, *shape].

It allocates, and copies token ranges out of and into blocks as bytes; who may do so is decided elsewhere. A block of
float KV may hold INT8 instead, for a sequence whose decode worker keeps that: each row lies where a float one would.

    bfloat16  | d values, 2 bytes each                   |
    int8      | d values, a byte each | scale |  unused  |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.device_room import DevicePayload, DeviceRoom
from kvcache.memory.host_copy import Bytes
from kvcache.memory.kv_copies import HostCopies, KVCopies, copies_of
from kvcache.memory.kv_dtype import stored_as
from kvcache.memory.token_slots import TokenSlots
from serving.host_memory import PAGE, HostMemory
from serving.kvspec import AUTO, ITEM_BYTES, SCALE, LayerKV, Plane

_SCALE_BYTES = 4
MAPPED = 1 << 30  # bytes of one mapping at most: Linux refuses one that is larger than all memory, written to or not


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
            needed = num_blocks * block_size * token_bytes(self.specs) + PAGE * _planes_of(self.specs)
            memory = HostMemory(min(needed, MAPPED))
            planes = [
                tuple(_zeros((*size, *plane.shape), plane.dtype, where, memory) for plane in spec.planes)
                for spec in self.specs
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
        return self.read_all(range(layer, layer + 1), slots)[0]

    def read_all(self, layers: range, slots: TokenSlots) -> list[list[Tensor]]:
        """`read` of each of these layers, in as few copies as may be."""
        parts = [[_rows(slots.tokens, plane) for plane in self.specs[layer].planes] for layer in layers]
        self.copies.take(layers, slots, [part.numpy().reshape(-1) for layer in parts for part in layer])
        return parts

    def read_into(self, layers: range, slots: TokenSlots, out: Bytes) -> bytes | None:
        """Copy the layers' planes at these slots, one after another, to `out`, uint8 [tokens * bytes of the layers].

        The digests of its leaves (kvcache.handoff.tree_digest), where they were computed beside the copy.
        """
        widths = [plane.token_bytes for layer in layers for plane in self.specs[layer].planes]
        ends = list(accumulate(slots.tokens * width for width in widths))
        return self.copies.take_digested(layers, slots, [out[begin:end] for begin, end in pairwise([0, *ends])])

    def pack(self, layers: range, slots: TokenSlots, room: DeviceRoom) -> DevicePayload | None:
        """What `read_into` reads, packed on the device; None where it lies elsewhere, or finds no place in `room`."""
        return self.copies.pack(layers, slots, room)

    def unpack(self, layers: range, slots: TokenSlots, payload: DevicePayload) -> None:
        """The inverse of `pack`, on any device with the same layers."""
        self.copies.unpack(layers, slots, payload)

    def write(self, layer: int, slots: TokenSlots, parts: Sequence[Tensor | Bytes]) -> None:
        """The inverse of `read`; parts may be arrays as well."""
        self.write_all(range(layer, layer + 1), slots, [parts])

    def write_all(self, layers: range, slots: TokenSlots, parts: Sequence[Sequence[Tensor | Bytes]]) -> None:
        """The inverse of `read_all`."""
        self.copies.put(layers, slots, [np.ascontiguousarray(part) for layer in parts for part in layer])

    @cached_property
    def copies(self) -> KVCopies:
        """What copies its bytes. On a device that takes threads, and memory that all its pools share."""
        return copies_of(self.specs, self.planes)

    @property
    def in_host_memory(self) -> bool:
        """True if copies take no longer than the bytes do, and wait for nothing."""
        return isinstance(self.copies, HostCopies)


def _rows(tokens: int, plane: Plane) -> Tensor:
    return torch.empty((tokens, plane.token_bytes), dtype=torch.uint8)


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


def _planes_of(specs: Sequence[LayerKV]) -> int:
    return sum(len(spec.planes) for spec in specs)


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device, memory: HostMemory) -> Tensor:
    """Zeros; in host `memory` they take up room only once they are written, so many blocks cost nothing to make."""
    kind: torch.dtype = getattr(torch, dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=kind, device=device)
    return memory.take(prod(shape) * kind.itemsize).view(kind).view(shape)


def token_bytes(specs: Sequence[LayerKV]) -> int:
    """Bytes of KV one token takes over all layers."""
    return sum(spec.token_bytes for spec in specs)


def blocks_in(memory_bytes: int, specs: Sequence[LayerKV], block_size: int) -> int:
    """How many blocks fit into this much memory."""
    return memory_bytes // (token_bytes(specs) * block_size)
