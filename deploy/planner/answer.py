"""What is asked of the planner and what it answers, as plain values: figures, ranks, the verdict.

Pure. It measures nothing and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.planner.attainment import Attainment, AttainmentGoal, OfferedTraffic
from deploy.planner.candidates import SearchSpace
from deploy.planner.composing import cost_per_million
from deploy.planner.front import JudgedValues
from deploy.planner.machines import Machines, PlannedModel
from deploy.planner.placements import CandidatePlacement, Rejection
from deploy.planner.rate_search import FoundGoodput


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """What is to be planned, and how far the search may go.

    `estimates` placements are measured as whole queues, `finalists` of each kind in the simulator
    with `finalist_requests` at least. `least_rate` is the
    requests a second that there will be. `reference`: as DistServe's simulator assumes, and searches.
    """

    model: PlannedModel
    machines: Machines
    load: OfferedTraffic
    goal: AttainmentGoal = field(default_factory=AttainmentGoal)
    space: SearchSpace = field(default_factory=SearchSpace)
    seeds: tuple[int, ...] = (0,)
    estimates: int = 40
    finalists: int = 1
    finalist_requests: int = 300
    least_rate: float = 0.0
    reference: bool = False


@dataclass(slots=True)
class PlannedPlacement:
    """A placement with its figures: from queues, and of finalists from the simulator too."""

    placement: CandidatePlacement
    estimate: FoundGoodput
    cost: float
    simulated: FoundGoodput | None = None
    alike: FoundGoodput | None = None  # the queues' figure over the very requests that were simulated
    dominated_by: CandidatePlacement | None = None
    curve: list[Attainment] = field(default_factory=list)

    @property
    def figures(self) -> FoundGoodput:
        """The best there are: simulated where they are."""
        return self.estimate if self.simulated is None else self.simulated

    @property
    def source(self) -> str:
        return "estimate" if self.simulated is None else "simulated"

    @property
    def goodput(self) -> float:
        """Requests a second; 0 where no rate meets the goal."""
        return self.figures.rate or 0.0

    @property
    def per_device(self) -> float:
        return self.goodput / self.placement.devices

    @property
    def per_million(self) -> float:
        """What a million good requests cost; inf without any."""
        if not self.goodput:
            return float("inf")
        return cost_per_million(self.placement.devices, self.goodput, self.cost)

    def judged(self) -> JudgedValues:
        """Of the estimate, so that all on a front are of one kind."""
        best, devices = self.estimate.at_best, self.placement.devices
        assert best is not None
        per_million = cost_per_million(devices, best.rate, self.cost)
        return (-best.rate / devices, per_million, best.ttft_p90, best.tpot_p90, float(devices))


@dataclass(slots=True)
class PlanAnswer:
    """Placements from the best down, and everything that was left out."""

    question: PlanQuestion
    ranked: list[PlannedPlacement]
    rejected: list[Rejection]
    considered: int = 0
    evolved: bool = False

    def best(self, split: bool | None = None) -> PlannedPlacement | None:
        """The first in rank, of one kind where asked; only what is measured alike is compared."""
        fitting = [each for each in self.ranked if split is None or each.placement.split == split]
        return fitting[0] if fitting else None

    @property
    def ratio(self) -> float | None:
        """Goodput per device of the best split placement over that of the best aggregated one, from one source."""
        split, mixed = self.best(True), self.best(False)
        if split is None or mixed is None:
            return None
        if split.source != mixed.source:
            rates = [each.estimate.rate or 0.0 for each in (split, mixed)]
            return rates[0] / split.placement.devices / (rates[1] / mixed.placement.devices)
        return split.per_device / mixed.per_device
