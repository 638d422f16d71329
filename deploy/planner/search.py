"""The search: phases alone, placements as queues, finalists in the simulator, then a ranking.

It decides what is measured; how and where is the prober's affair, and deploy/planner/answer.py has what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from deploy.planner.answer import PlanAnswer, PlannedPlacement, PlanQuestion
from deploy.planner.attainment import OfferedTraffic, offered
from deploy.planner.bounds import PhaseBounds, group_bound, phase_bounds
from deploy.planner.candidates import placements, usable_shapes
from deploy.planner.composing import PhaseFigures
from deploy.planner.front import dominates, pareto_front
from deploy.planner.placements import CandidatePlacement, InstanceGroup, InstanceShape, Rejection
from deploy.planner.probing import Measured, RateProber
from deploy.planner.queueing import QueueingModel, QueueingRules
from deploy.planner.rate_search import FoundGoodput, HalvingSearch, RateSearch, bracketing
from deploy.planner.shortlist import shortlist
from deploy.planner.simulated import SimulatedModel, why_not_simulated
from serving.messages import Role

PHASE_SECONDS = 30.0  # of requests that one worker alone is measured with
FINALIST_SECONDS = 15.0  # of requests that finalists are simulated with, at least
ESTIMATE_TOLERANCE, SIMULATED_TOLERANCE = 0.03, 0.1
MOST = 1_000_000  # placements that are held at once
REPLACED = 3  # times that finalists which fail in the simulator make room for the next best
CURVE = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)  # of a goodput: the rates of an attainment curve

Stage = Callable[[str, int], None]
"""Told of each stage: its name, and how many placements it measures."""


class PlanSearch:
    """One question, once: `answer` does all of it."""

    def __init__(self, question: PlanQuestion, prober: RateProber, stage: Stage = lambda name, count: None):
        self.question, self.prober, self.stage = question, prober, stage
        self.shapes, rejected = usable_shapes(question.model, question.machines, question.space)
        self.rejected = rejected
        machines, model = question.machines, question.model
        self.profiles = tuple((shape, model.profile(machines, shape)) for shape in self.shapes)
        rules = QueueingRules(
            reference=question.reference,
            kv_bytes=model.kv_bytes,
            layers=model.layers,
            link_bytes_per_second=machines.link if machines.nodes == 1 else machines.network,
        )
        self.far = QueueingModel(self.profiles, rules)
        self.near = QueueingModel(self.profiles, replace(rules, link_bytes_per_second=machines.link))

    def answer(self) -> PlanAnswer:
        """Raises ValueError where there is nothing to choose from."""
        question = self.question
        bounds = self._bounded()
        phases = self._phases_alone(bounds)
        every = list(islice(placements(question.model, question.machines, question.space, self.shapes), MOST + 1))
        if len(every) > MOST:
            raise ValueError(
                f"{question.machines.devices} devices give over {MOST:,} placements: plan fewer and repeat them, or"
                " restrict --tp, --pp, --links and --max-num-batched-tokens"
            )
        short = shortlist(question, list(dict.fromkeys(every)), phases)
        self.rejected += short.rejected
        if not short.placements:
            raise ValueError("no placement meets the objectives at any rate: " + _reasons(self.rejected))
        measured = self._estimated(short.placements, phases)
        finalists = self._simulated(measured)
        mark_dominated(measured)
        self._curves(finalists or measured[:3])
        ranked = sorted(measured, key=lambda each: (each.simulated is None, -each.per_device, str(each.placement)))
        return PlanAnswer(self.question, ranked, self.rejected, short.considered, short.evolved)

    def _bounded(self) -> dict[InstanceShape, PhaseBounds]:
        """Of every shape, from its profile alone."""
        requests = offered(self._phase_load(), 1.0, self.question.seeds[0])
        return {shape: phase_bounds(found, shape.pp, requests, self.question.goal) for shape, found in self.profiles}

    def _phase_load(self) -> OfferedTraffic:
        load = self.question.load
        return load if self.question.reference else replace(load, seconds=min(load.seconds, PHASE_SECONDS))

    def _phases_alone(self, bounds: dict[InstanceShape, PhaseBounds]) -> PhaseFigures:
        """One worker of each kind: prompts alone, decode steps alone, or both in one."""
        space, kinds = self.question.space, list[InstanceGroup]()
        for shape in self.shapes:
            kinds.append(InstanceGroup(Role.PREFILL, shape, 1, max(space.budgets)))
            kinds.append(InstanceGroup(Role.DECODE, shape))
            kinds += [InstanceGroup(Role.MIXED, shape, 1, budget) for budget in space.budgets if space.mixed]
        found = {kind: FoundGoodput() for kind in kinds}
        worth = [kind for kind in kinds if group_bound(kind, bounds[kind.shape])]
        for kind in kinds:
            if kind not in worth:
                self._reject(kind, "misses its objective even without a queue")
        self.stage("workers alone", len(worth))
        wanted: list[tuple[Measured, RateSearch]] = []
        for kind in worth:
            what = CandidatePlacement((kind,)) if kind.role == Role.MIXED else kind
            wanted.append((what, self._search(0.6 * group_bound(kind, bounds[kind.shape]), kind.shape.devices)))
        measured = self.prober.goodputs(self.near, wanted, self._phase_load())
        found |= dict(zip(worth, measured, strict=True))
        for kind, each in zip(worth, measured, strict=True):
            if each.rate is None:
                self._reject(kind, "misses its objective at every rate")
        return PhaseFigures(found)

    def _finalist_load(self) -> OfferedTraffic:
        load = self.question.load
        return replace(
            load,
            requests=min(load.requests, self.question.finalist_requests),
            seconds=min(load.seconds, FINALIST_SECONDS),
        )

    def _search(self, start: float, devices: int, tolerance: float = ESTIMATE_TOLERANCE) -> RateSearch:
        question = self.question
        if question.reference:
            return HalvingSearch(devices, question.goal.share)
        return bracketing(start, question.goal, tolerance)

    def _estimated(self, chosen: Sequence[CandidatePlacement], phases: PhaseFigures) -> list[PlannedPlacement]:
        """As whole queues, each search begun where its phases alone would end."""
        self.stage("queues", len(chosen))
        tied = [placement for placement in chosen if self._inside_a_node(placement)]
        measured: list[PlannedPlacement] = []
        for model, some in ((self.near, tied), (self.far, [each for each in chosen if each not in set(tied)])):
            wanted: list[tuple[Measured, RateSearch]] = []
            for placement in some:
                figures = phases.compose(placement)
                assert figures is not None
                wanted.append((placement, self._search(figures.rate, placement.devices)))
            for placement, found in zip(some, self.prober.goodputs(model, wanted), strict=True):
                if found.rate is None or found.rate < self.question.least_rate:
                    self._reject(placement, f"attains {found.rate or 0:.3g} requests/s at most")
                else:
                    measured.append(PlannedPlacement(placement, found, self.question.machines.cost))
        return sorted(measured, key=lambda each: (-each.per_device, str(each.placement)))

    def _inside_a_node(self, placement: CandidatePlacement) -> bool:
        """True where KV never crosses nodes: no handoff at all, a unit, or all of it in one node."""
        one = placement.devices <= self.question.machines.devices_per_node
        return not placement.split or placement.units > 1 or one

    def _simulated(self, measured: list[PlannedPlacement]) -> list[PlannedPlacement]:
        """The best of each kind once more, by the classes that serve.

        One that misses the goal there, or the rate that there will be, is left out of `measured`, and the next best
        takes its place, up to REPLACED times.
        """
        count = 0 if self.question.reference else self.question.finalists
        finalists: list[PlannedPlacement] = []
        for _ in range(REPLACED + 1 if count else 0):
            some = [
                each
                for split in (True, False)
                for each in _worth_simulating(measured, split, count - _kinds(finalists)[split])
            ]
            if not some:
                break
            self._simulate(some)
            for each in some:
                if each.simulated is None or not each.goodput or each.goodput < self.question.least_rate:
                    measured.remove(each)
                    self._reject(each.placement, f"attains {each.goodput:.3g} requests/s at most (simulated)")
                else:
                    finalists.append(each)
        if not measured:
            raise ValueError("no placement meets the objectives in the simulator: " + _reasons(self.rejected[::-1]))
        return finalists

    def _simulate(self, finalists: Sequence[PlannedPlacement]) -> None:
        """The simulator's figure, and the queues' over the same requests."""
        self.stage("simulator", len(finalists))
        for near in (True, False):
            some = [each for each in finalists if self._inside_a_node(each.placement) == near]
            model = SimulatedModel(self.profiles, (self.near if near else self.far).rules.link_bytes_per_second)
            wanted: list[tuple[Measured, RateSearch]] = [
                (each.placement, self._search(each.goodput, each.placement.devices, SIMULATED_TOLERANCE))
                for each in some
            ]
            load = self._finalist_load()
            for each, found in zip(some, self.prober.goodputs(model, wanted, load), strict=True):
                each.simulated = found
            alike: list[tuple[Measured, RateSearch]] = [
                (each.placement, self._search(each.goodput or each.estimate.rate or 1.0, each.placement.devices))
                for each in some
            ]
            queues = self.near if near else self.far
            for each, found in zip(some, self.prober.goodputs(queues, alike, load), strict=True):
                each.alike = found

    def _curves(self, shown: Sequence[PlannedPlacement]) -> None:
        """Of queues, over the requests that were simulated where some were."""
        self.stage("curves", len(shown))
        for each in shown:
            model = self.near if self._inside_a_node(each.placement) else self.far
            rates = [share * (each.estimate.rate or 0.0) for share in CURVE]
            load = None if each.simulated is None else self._finalist_load()
            each.curve = self.prober.curve(model, each.placement, rates, load)

    def _reject(self, what: object, reason: str) -> None:
        self.rejected.append(Rejection(str(what), reason))


def _worth_simulating(measured: Sequence[PlannedPlacement], split: bool, count: int) -> list[PlannedPlacement]:
    """The best `count` of a kind that have not been simulated."""
    left = [each for each in measured if each.placement.split == split and each.simulated is None]
    return [each for each in left if why_not_simulated(each.placement) is None][:count]


def _kinds(finalists: Sequence[PlannedPlacement]) -> dict[bool, int]:
    """How many are split, and how many aggregated."""
    return {split: sum(each.placement.split == split for each in finalists) for split in (True, False)}


def _reasons(rejected: Sequence[Rejection]) -> str:
    return "; ".join(f"{each.what}: {each.reason}" for each in rejected[:6])


def mark_dominated(measured: Sequence[PlannedPlacement]) -> None:
    """Each that is not on the front gets one that is, and beats it."""
    values = [each.judged() for each in measured]
    front = pareto_front(values)
    for index, each in enumerate(measured):
        beating = (other for other in front if dominates(values[other], values[index]))
        over = next(beating, None)
        each.dominated_by = None if over is None else measured[over].placement
