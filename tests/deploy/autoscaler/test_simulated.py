"""Over simulated workers and a production router: traffic shifts, a role flips, objectives are met again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.policy import AddWorker, DrainWorker, FlipWorker, predicted_gain
from deploy.simulator.autoscaled import AutoscaledRun, TrafficPhase, autoscaled, phased
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import Fitted, Profile
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass
from serving.messages import Role
from serving.step_cost import StepCost

# So slow that few tokens fill it: a prompt of 500 tokens takes 2.6 s, a decode worker gives about 30 tokens/s.
SLOW = Profile(
    name="slow",
    model="slow",
    steps=Fitted(StepCost(fixed=0.1, token=0.004, pair=1e-6, sequence=0.02, context=1e-5, error=0.1)),
    kv_tokens=16_384,
    kv_bytes=131_072,
    layers=32,
    max_num_seqs=64,
)
SHIFT_AT, END = 90.0, 300.0


def traffic(prompt: float, output: float) -> Traffic:
    made = TrafficClass(prompt=Lengths(prompt, 0.3), output=Lengths(output, 0.3), ttft_ms=8000.0, tpot_ms=400.0)
    return Traffic(name="made-up", classes=(made,))


PROMPT_HEAVY, DECODE_HEAVY = traffic(500, 8), traffic(100, 32)


def plan(*roles: Role) -> ClusterPlan:
    return ClusterPlan.of(SLOW, roles, "goodput", heartbeat_interval=2.0)


@cache
def shifted(*, dry_run: bool, end: float = END) -> AutoscaledRun:
    """Three prefill workers and one that decodes, and no room for a fifth."""
    cluster = plan(Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE)
    phases = [
        TrafficPhase(traffic=PROMPT_HEAVY, rate=0.6, seconds=SHIFT_AT),
        TrafficPhase(traffic=DECODE_HEAVY, rate=1.15, seconds=end - SHIFT_AT),
    ]
    return autoscaled(cluster, phased(phases, cluster, 3), AutoscalerLimits(most_workers=4), dry_run=dry_run)


def attainment(outcomes: Sequence[RequestOutcome], begin: float, end: float) -> float:
    among = [outcome.met for outcome in outcomes if begin <= outcome.arrived < end]
    return sum(among) / len(among)


def test_a_role_flips_when_traffic_shifts_and_attainment_recovers() -> None:
    scaled = shifted(dry_run=False)
    ((at, decision),) = scaled.actions
    assert isinstance(decision.action, FlipWorker) and decision.action.role is Role.DECODE
    assert SHIFT_AT < at < SHIFT_AT + 90 and "output tokens" in decision.shift
    outcomes = scaled.run.outcomes
    assert attainment(outcomes, SHIFT_AT + 30, at) < 0.5, "one decode worker is not enough"
    assert attainment(outcomes, at + 60, END) > 0.95
    assert [worker.role for worker in scaled.fleets[-1][1]].count(Role.DECODE) == 2


def test_no_request_is_lost_to_a_flip() -> None:
    outcomes = shifted(dry_run=False).run.outcomes
    assert all(outcome.error is None and outcome.finish is not None for outcome in outcomes)
    assert not any(any(audit.leaked.values()) for audit in shifted(dry_run=False).run.audits)


def test_a_dry_run_predicts_the_gain_and_changes_nothing() -> None:
    dry = shifted(dry_run=True, end=SHIFT_AT + 90)
    _, decision = dry.actions[0]
    assert isinstance(decision.action, FlipWorker) and decision.load is not None
    before, after = predicted_gain(decision.load, decision.action)
    assert after > before + 0.3
    assert {worker.state for _, fleet in dry.fleets for worker in fleet} == {"ready"}
    assert attainment(dry.run.outcomes, SHIFT_AT + 60, SHIFT_AT + 90) < 0.2


def test_an_idle_fleet_gives_workers_back_without_losing_a_request() -> None:
    cluster = plan(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    phases = [TrafficPhase(traffic=traffic(100, 16), rate=0.3, seconds=600.0)]
    scaled = autoscaled(cluster, phased(phases, cluster, 5), AutoscalerLimits())
    assert [type(decision.action) for _, decision in scaled.actions] == [DrainWorker, DrainWorker]
    assert all(outcome.error is None for outcome in scaled.run.outcomes)
    assert sorted(worker.role for worker in scaled.fleets[-1][1]) == [Role.DECODE, Role.PREFILL]


def test_a_short_fleet_gets_a_worker_that_serves() -> None:
    cluster = plan(Role.PREFILL, Role.DECODE)
    phases = [TrafficPhase(traffic=PROMPT_HEAVY, rate=0.5, seconds=240.0)]
    scaled = autoscaled(cluster, phased(phases, cluster, 7), AutoscalerLimits())
    _, decision = scaled.actions[0]
    assert decision.action == AddWorker(Role.PREFILL)
    placed = {worker for outcome in scaled.run.outcomes for worker, _ in outcome.placed}
    assert "prefill-new-1" in placed
    assert all(outcome.error is None for outcome in scaled.run.outcomes)


@pytest.mark.slow
def test_an_hour_of_constant_load_and_a_burst_change_nothing() -> None:
    """Two and a half times the load for half a minute, which is over before the window is."""
    cluster = plan(Role.PREFILL, Role.DECODE)
    steady = TrafficPhase(traffic=traffic(200, 8), rate=0.4, seconds=1785.0)
    burst = TrafficPhase(traffic=traffic(200, 8), rate=1.0, seconds=30.0)
    scaled = autoscaled(cluster, phased([steady, burst, steady], cluster, 9), AutoscalerLimits())
    assert scaled.actions == []
    assert all(outcome.error is None for outcome in scaled.run.outcomes)
