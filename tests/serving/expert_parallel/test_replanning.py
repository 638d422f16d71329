"""When experts are placed anew: for a worse balance than is borne, by few moves, and never for a little."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.channel import Channel
from serving.expert_parallel import planner
from serving.expert_parallel.planner import PLANNING_SECONDS, PlanningFailed, PlanningProcess, packed, unpacked
from serving.expert_parallel.replanning import BalancePolicy, LayerCommit, replanned
from serving.expert_parallel.rounds import RoundsEnded
from serving.expert_parallel.stages import changed
from serving.model.expert_balance import ExpertPlacement, Layout, placed
from tests.serving.model.test_expert_balance import drifted, zipf

LAYOUT = Layout(ranks=32, slots=10)


def after(placements: list[ExpertPlacement], commits: list[LayerCommit]) -> list[ExpertPlacement]:
    found = list(placements)
    for commit in commits:
        found[commit.layer] = changed(found[commit.layer], commit.stage)
    return found


@pytest.mark.parametrize("exponent", [0.8, 1.0])
def test_a_drift_is_followed_by_few_moves(exponent: float) -> None:
    loads = [[1e6 * load for load in zipf(exponent, seed)] for seed in range(3)]
    old = [placed(layer, LAYOUT) for layer in loads]
    now = [loads[0], drifted(loads[1], 4), drifted(loads[2], 5)]
    commits = replanned(old, now, BalancePolicy(above=1.06))
    new = after(old, commits)
    assert new[0] is old[0]
    for one, was, layer in zip(new[1:], old[1:], now[1:], strict=True):
        assert was.imbalance(layer) > 1.06 >= one.imbalance(layer)
        assert 0 < one.moves_from(was) <= 25
    layers = [commit.layer for commit in commits]
    assert set(layers[:2]) == {1, 2}, "the stages of a layer come one after the other"


def test_nothing_moves_between_target_and_bound() -> None:
    loads = [1e6 * load for load in zipf(1.0)]
    old, now = [placed(loads, LAYOUT)], drifted(loads)
    imbalance = old[0].imbalance(now)
    assert imbalance > 1.06
    assert replanned(old, [now], BalancePolicy(above=imbalance + 0.001)) == []
    assert replanned(old, [now], BalancePolicy(above=imbalance - 0.001)) != []


def test_nothing_moves_for_a_little_or_by_few_rows() -> None:
    loads = [1e6 * load for load in zipf(1.0)]
    floor = [placed(loads, Layout(ranks=320, slots=1))]  # 2.6, and it cannot be better
    assert replanned(floor, [loads], BalancePolicy()) == []
    old = [placed([1.0] * 256, LAYOUT)]
    assert replanned(old, [loads], BalancePolicy(fewest_rows=int(sum(loads)) + 1)) == []
    assert replanned(old, [loads], BalancePolicy(fewest_rows=int(sum(loads)))) != []


def test_the_worst_layers_come_first() -> None:
    old = [placed([1.0] * 256, LAYOUT)] * 3
    loads = [[1e6 * load for load in zipf(exponent)] for exponent in (0.5, 1.0, 0.8)]
    assert {commit.layer for commit in replanned(old, loads, BalancePolicy(most_layers=2))} == {1, 2}


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 2))
def test_plans_are_carried_out_and_travel_as_they_are(chance: random.Random, ranks: int, spare: int) -> None:
    layout = Layout(ranks=ranks, slots=-(-8 // ranks) + spare)
    old = [placed([chance.random() for _ in range(8)], layout) for _ in range(3)]
    loads = [[1e4 * chance.random() ** 3 for _ in range(8)] for _ in range(3)]
    policy = BalancePolicy(above=1.01, target=1.0, least_gain=0.001, fewest_rows=1)
    commits = replanned(old, loads, policy)
    assert unpacked(packed(commits)) == commits
    for one, was, layer in zip(after(old, commits), old, loads, strict=True):
        assert one.imbalance(layer) <= was.imbalance(layer) + 1e-9


@pytest.fixture
def planning() -> Iterator[PlanningProcess]:
    process = PlanningProcess()
    yield process
    process.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that have been started."""
    found = list[int]()

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            found.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return found


def test_another_process_plans_the_same_again_and_again(planning: PlanningProcess, started: list[int]) -> None:
    """One process: to start one for each plan would hold up steps each time."""
    loads = [[1e6 * load for load in zipf(1.0, seed, 16)] for seed in range(2)]
    old = [placed([1.0] * 16, Layout(ranks=4, slots=5))] * 2
    policy = BalancePolicy(most_moves=6)
    assert replanned(old, loads, policy) != []
    for _ in range(3):
        assert unpacked(planning.planned(old, np.array(loads), policy)) == replanned(old, loads, policy)
    assert len(started) == 1
    os.kill(started[0], signal.SIGKILL)
    with pytest.raises(PlanningFailed):
        planning.planned(old, np.array(loads), policy)
    assert unpacked(planning.planned(old, np.array(loads), policy)) == replanned(old, loads, policy)
    planning.close()
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_who_ends_does_not_wait_for_a_process_that_is_slow_to_start(
    planning: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a slow start count as one that does not listen, however much it is told."""

    def end() -> None:
        raise RoundsEnded

    monkeypatch.setattr(planner, "module_command", lambda name: ("sleep", "600"))
    monkeypatch.setattr(planner, "TELLING_SECONDS", 0.01)
    with pytest.raises(RoundsEnded):
        planning.planned([placed([1.0] * 256, LAYOUT)] * 58, np.ones((58, 25_600)), BalancePolicy(), end)


def test_a_process_that_nobody_listens_to_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, theirs = Channel.pair()
    monkeypatch.setattr("sys.argv", ["planner", str(os.dup(theirs.fileno()))])
    channel.close()
    theirs.close()
    planner.main()


def test_a_plan_is_given_up_by_who_ends(planning: PlanningProcess) -> None:
    def end() -> None:
        raise RoundsEnded

    loads = np.array([[1e6 * load for load in zipf(1.0, seed, 256)] for seed in range(58)])
    old = [placed([1.0] * 256, LAYOUT)] * 58
    began = time.monotonic()
    with pytest.raises(RoundsEnded):
        planning.planned(old, loads, BalancePolicy(most_layers=58), end)
    assert time.monotonic() - began < PLANNING_SECONDS / 10


@pytest.mark.parametrize("changes", [{"above": 1.0}, {"target": 0.9}, {"least_gain": 0.0}, {"kept": 1.0}])
def test_a_policy_that_never_rests_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is none"):
        BalancePolicy(**changes)  # type: ignore[arg-type]
