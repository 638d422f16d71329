"""The second stage of a search: what a placement attains in the simulator, which runs the classes that serve.

It stands between the planner's values and the simulator's; it models nothing. The simulator has no pipelines of
stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from deploy.planner.attainment import Attainment, AttainmentGoal, OfferedTraffic, arriving, attained, offered
from deploy.planner.placements import CandidatePlacement, InstanceShape
from deploy.simulator.profiles import Profile
from serving.messages import Role

if TYPE_CHECKING:
    from deploy.simulator.cluster import ClusterPlan
    from deploy.simulator.outcomes import RequestOutcome

LATE = float("inf")


def why_not_simulated(placement: CandidatePlacement) -> str | None:
    """Why the simulator has no figure for a placement; None where it has."""
    if any(group.shape.pp > 1 for group in placement.groups):
        return "the simulator has no pipelines of stages"
    return None


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Workers of these profiles, by shape, behind one router. An AttainmentModel. The link's bytes/s are a device's."""

    profiles: tuple[tuple[InstanceShape, Profile], ...]
    link_bytes_per_second: float
    policy: str = "goodput"

    @property
    def source(self) -> str:
        return "simulated"

    def attainment(
        self, placement: CandidatePlacement, load: OfferedTraffic, rate: float, seed: int, goal: AttainmentGoal
    ) -> Attainment:
        """One unit at its share of the rate: units are alike. Raises ValueError for pipelines of stages."""
        from deploy.simulator.run import simulate  # with torch, which nothing else here needs

        if reason := why_not_simulated(placement):
            raise ValueError(f"{placement}: {reason}")
        share = rate / placement.units
        requests, arrivals = offered(load, share, seed), arriving(load, load.count(share), seed)
        spare, late = (1.0 - goal.share) * len(arrivals) + 1e-9, 0

        def judge(outcome: RequestOutcome) -> None:
            nonlocal late
            late += not outcome.met
            if late > spare and goal.joint:
                raise _GoalOutOfReach

        outcomes: list[RequestOutcome] = []
        try:
            outcomes = simulate(_plan(self, placement), arrivals, share, seed=seed, ended=judge).outcomes
        except* _GoalOutOfReach:
            most = 1 - late / len(arrivals)
            given_up = Attainment(rate=rate, offered=len(arrivals), ttft=1.0, tpot=1.0, joint=most)
        if not outcomes:
            return given_up
        ended = [outcome.error is None and outcome.finish is not None for outcome in outcomes]
        ttfts = [
            LATE if outcome.ttft is None or not well else outcome.ttft
            for outcome, well in zip(outcomes, ended, strict=True)
        ]
        tpots = [outcome.tpot or 0.0 if well else LATE for outcome, well in zip(outcomes, ended, strict=True)]
        return replace(attained(share, ttfts, tpots, requests), rate=rate)


class _GoalOutOfReach(Exception):
    """Ends a run in which more requests were late than may be."""


@lru_cache(maxsize=64)
def _plan(model: SimulatedModel, placement: CandidatePlacement) -> ClusterPlan:
    """The cluster of one unit."""
    from deploy.simulator.cluster import ClusterPlan
    from deploy.simulator.network import NetworkModel

    profiles = dict(model.profiles)
    roles = tuple(Role(group.role) for group in placement.groups for _ in range(group.count))
    of_role = {Role(group.role): profiles[group.shape] for group in placement.groups}
    network = NetworkModel(bytes_per_second=placement.links * model.link_bytes_per_second)
    plan = ClusterPlan.of(next(iter(of_role.values())), roles, model.policy, network=network, of_role=of_role)
    budget = max(group.budget for group in placement.groups)
    return replace(plan, engine=replace(plan.engine, max_num_batched_tokens=budget))
