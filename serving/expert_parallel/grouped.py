"""INT8 experts of a rank in two compiled calls, over rows where their senders have them.

To the bit what the experts' own modules compute, whose place they take where they can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from serving.expert_parallel.exchange import Received
from serving.kernels import cpu
from serving.kernels.cpu.grouped import GroupedLinear
from serving.model.gated_mlp import GatedMlp
from serving.model.quantized_linear import QuantizedLinear


class GroupedExperts:
    """The experts behind a rank's slots, in their order. Their weights may change in place, but not their tensors."""

    def __init__(
        self, kernels: cpu.Kernels, gate_up: GroupedLinear, down: GroupedLinear, product: Callable[[Tensor], Tensor]
    ) -> None:
        self._kernels, self._gate_up, self._down, self._product = kernels, gate_up, down, product

    def results(self, received: Received, out: Tensor) -> Tensor:
        """What they make of the int8 rows received, in `out` [N, H]; what is between two layers is of its type."""
        rows = received.in_place()
        inner = torch.empty(len(rows.addresses), self._gate_up.outputs, dtype=out.dtype)
        self._gate_up(self._kernels, rows, received.counts, inner)
        return self._down(self._kernels, self._product(inner).contiguous(), received.counts, out)


def grouped(slots: Sequence[nn.Module]) -> GroupedExperts | None:
    """None where modules have to compute for themselves.

    That is where experts are not INT8 through and through, or transform their inputs, and without compiled kernels.
    """
    layers = [_layers_of(slot) for slot in slots]
    found = [layer for layer in layers if layer is not None]
    kernels = _kernels(torch.get_num_threads()) if len(found) == len(layers) else None
    if kernels is None:
        return None
    first = slots[0]
    assert isinstance(first, GatedMlp)
    gate_up, down = (_joined([pair[number] for pair in found]) for number in range(2))
    return GroupedExperts(kernels, gate_up, down, first.product)


def _layers_of(expert: nn.Module) -> tuple[QuantizedLinear, QuantizedLinear] | None:
    if not isinstance(expert, GatedMlp):
        return None
    gate_up, down = expert.gate_up, expert.down
    if isinstance(gate_up, QuantizedLinear) and isinstance(down, QuantizedLinear):
        plain = all(one.weight.dtype is torch.int8 and not one.rotation for one in (gate_up, down))
        return (gate_up, down) if plain and gate_up.weight.device.type == "cpu" else None
    return None


def _joined(layers: Sequence[QuantizedLinear]) -> GroupedLinear:
    return GroupedLinear([one.weight for one in layers], [one.scale for one in layers], [one.bias for one in layers])


@cache
def _kernels(threads: int) -> cpu.Kernels | None:
    """One team for all layers of this process, which take turns."""
    return cpu.load(threads=threads)
