"""Runs of many requests: the figures that they have had, memory that does not grow with them, and an early end."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import signal
import tracemalloc
from collections import Counter
from contextlib import nullcontext

import pytest

from deploy.simulator import report
from deploy.simulator import run as run_module
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.command import BreakOff
from deploy.simulator.outcomes import OutcomeColumns, RequestOutcome, figures
from deploy.simulator.profiles import PROFILES
from deploy.simulator.run import simulate
from deploy.simulator.study import Study
from deploy.simulator.traffic import TRAFFIC, Lengths, Traffic, TrafficClass, arriving, trace
from router import explain
from serving.messages import Role
from tests.deploy.simulator.test_run import PLACEMENTS, run

PROFILE = PROFILES["a100-opt13b"]
SHORT = Traffic(name="short", classes=(TrafficClass(prompt=Lengths(40, 0.5), output=Lengths(4)),))


@pytest.mark.parametrize(
    ("placement", "policy", "workload", "rate", "ttfts", "tpots", "placed"),
    [
        ("mixed", "least_loaded", "chat", 15.0, 3.3226655227653428, 1.1600620679182938, [21, 19]),
        ("both", "goodput", "shared-prefix", 8.0, 6.367083336301174, 1.3505710006020721, [29, 11]),
        ("split", "prefix_aware", "long-mixed", 5.0, 6.502697004677173, 0.9938537025864739, [21, 19]),
    ],
)
def test_a_run_comes_to_what_it_always_came_to(
    placement: str,
    policy: str,
    workload: str,
    rate: float,
    ttfts: float,
    tpots: float,
    placed: list[int],
) -> None:
    """Seconds summed over all requests, and how many were leased to each worker: whoever makes it faster keeps them."""
    done, _ = run(PLACEMENTS[placement], policy=policy, traffic=TRAFFIC[workload], rate=rate, seed=7)
    assert all(outcome.error is None for outcome in done.outcomes)
    leased = Counter(worker for outcome in done.outcomes for worker, side in outcome.placed if side == "decode")
    assert [leased[worker] for worker in sorted(leased)] == placed
    assert sum(outcome.ttft or 0.0 for outcome in done.outcomes) == pytest.approx(ttfts, rel=1e-9)
    assert sum(outcome.tpot or 0.0 for outcome in done.outcomes) == pytest.approx(tpots, rel=1e-9)


def test_a_trace_comes_one_by_one_as_it_comes_at_once() -> None:
    traffic = TRAFFIC["long-mixed"]
    assert tuple(arriving(traffic, PROFILE, 50, 3)) == trace(traffic, PROFILE, 50, 3)


def test_memory_does_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some numbers each, once what is bounded is full: here the explanations of requests, and small KV."""
    monkeypatch.setattr(explain.ExplainLog.__init__, "__defaults__", (None, 1 << 14))
    plan = ClusterPlan.of(PROFILE, (Role.MIXED,), "prefix_aware")
    plan = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, num_kv_blocks=32))
    held: dict[int, int] = {}
    columns = OutcomeColumns()

    def ended(outcome: RequestOutcome) -> None:
        columns.add(outcome)
        if len(columns) in (200, 400):
            gc.collect()
            held[len(columns)] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        done = simulate(plan, arriving(SHORT, PROFILE, 410, 0), 10.0, ended=ended, keep=False)
    finally:
        tracemalloc.stop()
    assert len(columns) == 410 and not done.outcomes
    assert (held[400] - held[200]) / 200 < 400, "bytes for each further request"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_request_that_has_ended_leaves_nothing_to_the_garbage_collector(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refers to itself lies about until all objects are looked at, which among many happens seldom."""
    plan = ClusterPlan.of(PROFILE, PLACEMENTS[placement], "least_loaded")
    monkeypatch.setattr(run_module, "collecting_seldom", nullcontext)
    found: list[Counter[str]] = []
    for _ in range(3):  # what a thread of an earlier test leaves meanwhile is in one run, what requests leave in all
        found.append(garbage_of(plan))
        if not found[-1]:
            return
    raise AssertionError(found)


def garbage_of(plan: ClusterPlan) -> Counter[str]:
    """What refers to itself after forty of the requests of a small run, by type."""
    found: list[object] = []
    over = [0]

    def ended(outcome: RequestOutcome) -> None:
        over[0] += 1
        if over[0] in (20, 60):
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            found[:] = gc.garbage  # those of the first twenty may be the cluster's own
            gc.garbage.clear()

    gc.collect()
    gc.disable()
    try:
        simulate(plan, arriving(TRAFFIC["long-mixed"], PROFILE, 70, 0), 10.0, ended=ended, keep=False)
    finally:
        gc.enable()
    assert over[0] == 70
    return Counter(type(each).__name__ for each in found)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_is_broken_off_tells_of_those_that_had_ended(jobs: int) -> None:
    plan = ClusterPlan.of(PROFILE, (Role.MIXED,), "least_loaded")
    study = Study(plan=plan, traffic=SHORT, requests=2000 * jobs, seeds=tuple(range(jobs)), jobs=jobs)
    over = [0]

    def ended(count: int) -> None:
        over[0] += count

    found = study.at(20.0, ended, stopped=lambda: over[0] >= 40)
    assert not found.whole and 40 <= found.offered < 2000
    assert found.attainment > 0 and found.ttft_p50 > 0
    assert math.isnan(found.backlog_slope), "of those that are still inside nothing is known"
    assert "broken off" in report.rates_table(report.PolicyResult(policy="a", rates={20.0: found}))


def test_the_first_ctrl_c_asks_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with BreakOff() as broken_off:
        assert not broken_off.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert broken_off.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_in_which_nothing_ended_has_no_figures_but_an_answer() -> None:
    found = figures(1.0, [OutcomeColumns()])
    assert found.offered == 0 and found.attainment == 0.0 and found.seconds == 0.0
