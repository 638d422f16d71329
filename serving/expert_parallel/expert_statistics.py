"""Counts which experts the rows of one rank take, layer by layer, as the layers compute. It knows no placement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Those of one layer, int64 [E]: who counts by himself adds to `taken`, others call it."""

    taken: Tensor
    one: Tensor  # [1]

    def __call__(self, experts_TK: Tensor) -> None:
        """The experts [T, K] of a layer's rows."""
        chosen = experts_TK.flatten()
        self.taken.index_add_(0, chosen, self.one.expand(len(chosen)))


class ExpertStatistics:
    """Counts since they were last taken, int64 [L, E] on the layers' device: added in place, read by nobody else.

    A step costs one addition a layer, whatever has been counted; the host waits for the device in `taken` alone.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)

    def of_layer(self, layer: int) -> LayerCounts:
        return LayerCounts(self._counts[layer], self._one)

    def taken(self) -> Tensor:
        """The counts [L, E], on the CPU; counting begins anew."""
        found = self._counts.to("cpu", copy=True)
        self._counts.zero_()
        return found
