"""When the experts of a serving group are placed anew, and how: few moves, and none for little.

Pure. Loads are counts of rows from all ranks, of which older ones have faded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from serving.expert_parallel.stages import Stage, stages
from serving.model.expert_balance import ExpertPlacement, replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancePolicy:
    """A layer is placed anew if its imbalance is `above` this, down to `target`, where `least_gain` comes of it.

    Between `target` and `above` nothing moves: loads that waver move no expert to and fro.
    """

    above: float = 1.1
    target: float = 1.05
    least_gain: float = 0.03  # of the imbalance
    most_moves: int = 25  # of one layer in one round
    most_layers: int = 4  # in one round, the worst first
    fewest_rows: int = 1000  # counted in a layer before it is judged
    kept: float = 0.5  # of the loads counted so far, from one round to the next

    def __post_init__(self) -> None:
        if not 1 <= self.target < self.above or self.least_gain <= 0 or not 0 <= self.kept < 1:
            raise ValueError(f"a balance above {self.above} down to {self.target} is none")


@dataclass(frozen=True, slots=True)
class LayerCommit:
    """A stage of one layer, which is switched at one boundary between steps."""

    layer: int  # among the MoE layers
    stage: Stage


def replanned(
    placements: Sequence[ExpertPlacement], loads: Sequence[Sequence[float]], policy: BalancePolicy
) -> list[LayerCommit]:
    """What a group changes next, in order: the first stages of all chosen layers, then their second ones, ….

    So a layer's next stage is copied while another's is switched.
    """
    before = [placement.imbalance(layer) for placement, layer in zip(placements, loads, strict=True)]
    heavy = [
        layer
        for layer in sorted(range(len(placements)), key=lambda layer: -before[layer])
        if before[layer] > policy.above and sum(loads[layer]) >= policy.fewest_rows
    ]
    ways: list[list[LayerCommit]] = []
    for layer in heavy:
        if len(ways) == policy.most_layers:
            break
        new = replaced(placements[layer], loads[layer], most_moves=policy.most_moves, target=policy.target)
        if before[layer] - new.imbalance(loads[layer]) >= policy.least_gain:
            ways.append([LayerCommit(layer, stage) for stage in stages(placements[layer], new)])
    return [commit for turn in zip_longest(*ways) for commit in turn if commit is not None]
