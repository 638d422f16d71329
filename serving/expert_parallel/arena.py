"""The memory that one rank's routed experts lie in: for each MoE layer as many buffers as slots, and one to spare.

Modules compute straight from it. In shared memory other ranks of the host read from it what they are to hold too.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNED = 64  # bytes, as torch's own allocations: products of the same bits


@dataclass(frozen=True, slots=True)
class ExpertField:
    """One parameter of an expert, at so many bytes from the beginning of its buffer."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int

    def view(self, buffer: Tensor) -> Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """How an expert's parameters, weights and scales alike, lie in a buffer of `size` bytes."""

    fields: tuple[ExpertField, ...]
    size: int

    @classmethod
    def of(cls, experts: Sequence[nn.Module]) -> ExpertFormat:
        """Raises ValueError where they differ: then one's buffer does not fit another."""
        fields, offset = [], 0
        for name, parameter in experts[0].named_parameters():
            fields.append(ExpertField(name, parameter.shape, parameter.dtype, offset))
            offset += -(-parameter.numel() * parameter.itemsize // ALIGNED) * ALIGNED
        first = [(field.name, field.shape, field.dtype) for field in fields]
        for expert in experts:
            if [(name, one.shape, one.dtype) for name, one in expert.named_parameters()] != first:
                raise ValueError("experts of different forms cannot take each other's place")
        return cls(tuple(fields), offset)


class ExpertArena:
    """Buffers of one rank, `[layers, slots + 1]` of `form.size` bytes each, in `memory`."""

    def __init__(self, form: ExpertFormat, layers: int, slots: int, memory: Tensor) -> None:
        """`memory` is uint8 of `arena_bytes`, of this rank or, to read from, of another."""
        assert memory.dtype is torch.uint8 and len(memory) == arena_bytes(form, layers, slots)
        self.form, self.slots = form, slots
        self._memory = memory.view(layers, slots + 1, form.size)

    def offset(self, layer: int, number: int) -> int:
        """Bytes from the beginning of the memory to a buffer."""
        return (layer * (self.slots + 1) + number) * self.form.size

    def buffer(self, layer: int, number: int) -> Tensor:
        """uint8 [form.size], a view."""
        return self._memory[layer, number]

    def holding(self, layer: int, experts: Sequence[nn.Module]) -> list[nn.Module]:
        """A module for each buffer of a layer, the last one's weights zero: `experts` are those of its slots.

        Their weights are copied; the modules given keep theirs, and may be let go.
        """
        modules = []
        for number, expert in enumerate([*experts, experts[0]]):
            buffer = self.buffer(layer, number)
            if number == self.slots:
                buffer.zero_()  # or its pages would be found while ranks compute, and the machine gives them slowly
            twin = deepcopy(expert, {id(one): one for one in expert.parameters()})
            for field in self.form.fields:
                view = field.view(buffer)
                if number < self.slots:
                    view.copy_(expert.get_parameter(field.name))
                owner, _, leaf = field.name.rpartition(".")
                setattr(twin.get_submodule(owner), leaf, nn.Parameter(view, requires_grad=False))
            modules.append(twin)
        return modules


def arena_bytes(form: ExpertFormat, layers: int, slots: int) -> int:
    return layers * (slots + 1) * form.size
