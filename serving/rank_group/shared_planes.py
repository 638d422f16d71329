"""KV planes in memory that all ranks of a host map: any of them reads and writes any sequence's KV.

The leader alone decides who may. What orders its ranks' writes are the exchange and the channel, once a layer and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from serving.kvspec import LayerKV
from serving.model.decoder import Planes
from serving.rank_group.messages import PlanePlaces, TensorPlace
from serving.shared_memory import FIRST_BYTE, Segment, mapped

ALIGNED = 64


class SharedPlanes:
    """Planes for `num_blocks` blocks of each layer, zeros that take up memory as they are written. The leader's."""

    def __init__(self, specs: Sequence[LayerKV], num_blocks: int, block_size: int) -> None:
        shapes = [[(num_blocks, block_size, *plane.shape) for plane in spec.planes] for spec in specs]
        sizes = [
            [_aligned(prod(shape) * _dtype(plane.dtype).itemsize) for shape, plane in zip(of, spec.planes, strict=True)]
            for of, spec in zip(shapes, specs, strict=True)
        ]
        self.segment = Segment(sum(map(sum, sizes)), "millrace-group-kv")
        self._memory = torch.from_numpy(self.segment.memory)
        self.planes: list[Planes] = []
        first = FIRST_BYTE
        for spec, of, bytes_of in zip(specs, shapes, sizes, strict=True):
            layer = []
            for plane, shape, size in zip(spec.planes, of, bytes_of, strict=True):
                dtype = _dtype(plane.dtype)
                layer.append(self._memory[first : first + prod(shape) * dtype.itemsize].view(dtype).view(shape))
                first += size
            self.planes.append(tuple(layer))

    def places(self, planes: Sequence[Planes]) -> PlanePlaces:
        """Where these planes lie, which are views of this memory."""
        return [[self._place(plane) for plane in layer] for layer in planes]

    def _place(self, plane: Tensor) -> TensorPlace:
        first = plane.data_ptr() - self._memory.data_ptr()
        assert 0 <= first < len(self._memory), "a plane that is not in shared memory"
        return TensorPlace(first, str(plane.dtype).removeprefix("torch."), tuple(plane.shape), plane.stride())


class MappedPlanes:
    """The leader's memory in another rank. Raises SegmentUnavailable where it cannot be had."""

    def __init__(self, details: bytes) -> None:
        self._memory = torch.from_numpy(mapped(details))

    def at(self, places: PlanePlaces) -> list[Planes]:
        return [tuple(self._tensor(place) for place in layer) for layer in places]

    def _tensor(self, place: TensorPlace) -> Tensor:
        dtype = _dtype(place.dtype)
        first, unaligned = divmod(place.first_byte, dtype.itemsize)
        assert not unaligned
        return self._memory.view(dtype).as_strided(place.shape, place.strides, first)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
