"""The experts that a rank's model holds, brought in line with a placement: what is missing is loaded, the rest let go.

Where weights come from is the loader's matter. What is loaded replaces nothing until it is all there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import nn

from serving.expert_parallel.bounded import Overdue, within
from serving.expert_parallel.exchange import ExpertExchange
from serving.expert_parallel.layer import ExpertParallelMlp, apply_expert_parallel, moe_layers
from serving.expert_parallel.surviving import ExpertsLost, Placements
from serving.model.decoder import Decoder

ExpertLoader = Callable[[int, int], nn.Module]
"""(MoE layer, counted from the first one; expert) → the expert, as the model would have it.

Raises ValueError or OSError where its weights cannot be had (`serving.loader.experts`).
"""


class HeldExperts:
    """Of one rank's `model`, which holds some experts of each MoE layer (`layer.hold_experts`), or all."""

    def __init__(self, model: Decoder, load: ExpertLoader | None) -> None:
        self.model = model
        self.load = load

    def held(self) -> list[list[int]] | None:
        """The experts behind the slots of each MoE layer, wherever they have been moved; None before they are placed.

        Loaded ones count when they are placed.
        """
        layers = [mlp for _, mlp in moe_layers(self.model)]
        placed = [layer for layer in layers if isinstance(layer, ExpertParallelMlp)]
        return [list(layer.held) for layer in placed] if len(placed) == len(layers) else None

    def missing(self, placements: Placements, rank: int) -> list[tuple[int, int]]:
        """(MoE layer, expert) of what this rank is to hold and does not."""
        return [
            (number, expert)
            for number, ((_, mlp), placement) in enumerate(zip(moe_layers(self.model), placements, strict=True))
            for expert in sorted(set(placement.slots[rank]) - {int(name) for name, _ in mlp.experts.named_children()})
        ]

    def fetch(self, placements: Placements, rank: int, seconds: float) -> int:
        """Load what is missing, and say how many experts it was.

        Raises ExpertsLost for what could not be loaded within `seconds`.
        """
        missing = self.missing(placements, rank)
        until = time.monotonic() + seconds
        layers = [mlp for _, mlp in moe_layers(self.model)]
        for done, (layer, expert) in enumerate(missing):
            try:
                module = self._loaded(layer, expert, until - time.monotonic())
            except (Overdue, ValueError, OSError) as error:
                raise ExpertsLost(_by_layer(missing[done:]), f"their weights were not loaded: {error}") from error
            every = {**dict(layers[layer].experts.named_children()), str(expert): module}
            layers[layer].experts = nn.ModuleDict(every)  # type: ignore[assignment]
        return len(missing)

    def _loaded(self, layer: int, expert: int, seconds: float) -> nn.Module:
        load = self.load
        if load is None:
            raise ValueError("this rank has no loader")
        if seconds <= 0:
            raise Overdue("the time for loading is up")
        return within(seconds, lambda: load(layer, expert))

    def place(self, placements: Placements, exchange: ExpertExchange) -> None:
        """Compute by these placements from now on, and let go of experts that they put elsewhere."""
        for (_, mlp), placement in zip(moe_layers(self.model), placements, strict=True):
            held = set(placement.slots[exchange.rank])
            kept = {name: expert for name, expert in mlp.experts.named_children() if int(name) in held}
            mlp.experts = nn.ModuleDict(kept)  # type: ignore[assignment]
        apply_expert_parallel(self.model, placements, exchange)


def _by_layer(experts: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, expert in experts:
        found.setdefault(layer, []).append(expert)
    return found
