"""Which placements are worth measuring as a whole, by what their phases attain alone; the others with the reason.

Pure. Spaces that can be walked are, others are searched by NSGA-II (deploy/planner/front.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.planner.answer import PlanQuestion
from deploy.planner.candidates import packs
from deploy.planner.composing import ComposedFigures, PhaseFigures
from deploy.planner.front import JudgedValues, dominates, evolved_front, pareto_front
from deploy.planner.placements import CandidatePlacement, Rejection

EXACT = 20_000  # placements that are all walked
OVERLAP = 1.25  # by how much a whole placement may exceed its phases alone: queues that share workers wait less


@dataclass(slots=True)
class Shortlist:
    """`placements` in the order of promise, out of `considered`; `evolved` where not all were walked."""

    considered: int
    evolved: bool
    placements: list[CandidatePlacement] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)


def shortlist(
    question: PlanQuestion, every: Sequence[CandidatePlacement], phases: PhaseFigures, exact: int = EXACT
) -> Shortlist:
    """The `question.estimates` most promising: half by rank, split and aggregated in turn, then the front, then rank.

    Raises ValueError where the space is too large to walk and pymoo is missing.
    """
    found = Shortlist(len(every), len(every) > exact)
    composed = _composed(question, _evolved(question, every, phases) if found.evolved else every, phases, found)
    names = list(composed)
    judged = [composed[each].judged(each.devices, question.machines.cost) for each in names]
    order = sorted(range(len(names)), key=lambda index: (judged[index], index))
    kinds = [[index for index in order if names[index].split == split] for split in (True, False)]
    turns = [index for pair in zip(*kinds, strict=False) for index in pair]
    front = set(pareto_front(judged))
    most = max(question.estimates, 2)  # one of each kind: a verdict compares them
    promise = [*turns[: max(most // 2, 2)], *(index for index in order if index in front), *order]
    chosen = list(dict.fromkeys(promise))[:most]
    found.placements = [names[index] for index in chosen]
    left = set(range(len(names))) - set(chosen)
    for index in sorted(left):
        over = next((other for other in chosen if dominates(judged[other], judged[index])), None)
        told = "not measured: lower in rank" if over is None else f"dominated by {names[over]}, by its phases alone"
        rate = composed[names[index]].rate / names[index].devices
        found.rejected.append(Rejection(str(names[index]), f"{told} ({rate:.3g} requests/s and device)"))
    return found


def _composed(
    question: PlanQuestion, pool: Sequence[CandidatePlacement], phases: PhaseFigures, found: Shortlist
) -> Mapping[CandidatePlacement, ComposedFigures]:
    """Of those that could serve at all."""
    composed: dict[CandidatePlacement, ComposedFigures] = {}
    for placement in pool:
        figures = phases.compose(placement)
        if figures is None:
            continue  # the worker that cannot is told of by itself
        if not packs(placement, question.machines):
            found.rejected.append(Rejection(str(placement), "does not pack into the nodes"))
        elif figures.rate * OVERLAP < question.least_rate:
            told = f"attains about {figures.rate:.3g} of {question.least_rate:g} requests/s"
            found.rejected.append(Rejection(str(placement), told))
        else:
            composed[placement] = figures
    return composed


def _evolved(
    question: PlanQuestion, every: Sequence[CandidatePlacement], phases: PhaseFigures
) -> list[CandidatePlacement]:
    """On the front of a space too large to walk. Genes: kind, both shapes, both numbers, units, budget."""
    shapes = sorted({group.shape for each in every for group in each.groups})
    budgets = sorted({each.groups[0].budget for each in every})
    keyed: dict[tuple[int, ...], CandidatePlacement] = {}
    for each in every:
        first, last = each.groups[0], each.groups[-1]
        both = shapes.index(first.shape), shapes.index(last.shape)
        keyed[(int(each.split), *both, first.count, last.count, each.units, budgets.index(first.budget))] = each
    sizes = [max(column) + 1 for column in zip(*keyed, strict=True)]

    def judge(genes: tuple[int, ...]) -> JudgedValues | None:
        placement = keyed.get(genes)
        figures = None if placement is None or not packs(placement, question.machines) else phases.compose(placement)
        if placement is None or figures is None or figures.rate * OVERLAP < question.least_rate:
            return None
        return figures.judged(placement.devices, question.machines.cost)

    return [keyed[genes] for genes in evolved_front(sizes, judge, question.seeds[0])]
