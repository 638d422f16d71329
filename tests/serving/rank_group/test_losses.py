"""Ranks that are killed or stopped in the middle of a step: the others compute it again, and the ranks come back."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from serving import logs
from serving.expert_parallel.surviving import ExpertsLost
from serving.rank_group.epochs import GroupEpochs
from serving.rank_group.leader import SpreadModel
from serving.rank_group.member import EpochMember
from serving.rank_group.messages import BeginEpoch
from serving.rank_group.ranks import MEETING_SECONDS
from tests.fakes.awake import retaken
from tests.fakes.stopping import stop
from tests.serving.model.oracle import build, configs, save
from tests.serving.rank_group.groups import (
    LENGTHS,
    NEEDS_KERNELS,
    Side,
    alone,
    compiled_alone,
    exists,
    group_forward,
    harmed,
    pids,
    spread_over,
)

ALL = range(len(LENGTHS))
RANKS, VICTIM = 3, 1
EXPERTS = configs()["mixtral"].num_local_experts
BACK_SECONDS = 120.0  # that a busy machine may need to start a process


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(configs()["mixtral"]), tmp_path_factory.mktemp("mixtral"))


def until_back(spread: SpreadModel, group: Side, reference: Side) -> None:
    """Sequence by sequence in turn, steps until all ranks are in the group again."""
    until, turn = time.monotonic() + BACK_SECONDS, 0
    came = threading.Event()
    while spread.ranks.size < RANKS:
        assert time.monotonic() < until, "the rank does not come back"
        came.wait(0.2)
        if any(keeper.offers for keeper in spread.ranks.keepers):
            group.step([turn])
            reference.step([turn])
            turn += 1


@pytest.mark.parametrize(
    ("how", "redundant", "compiled"),
    [
        (signal.SIGKILL, 0, False),
        pytest.param(signal.SIGKILL, 0, True, marks=NEEDS_KERNELS),
        pytest.param(signal.SIGSTOP, EXPERTS, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, EXPERTS, True, marks=[pytest.mark.slow, NEEDS_KERNELS]),
    ],
)
@retaken
def test_a_step_that_loses_a_rank_is_repeated_and_the_rank_comes_back(
    how: signal.Signals, redundant: int, compiled: bool, mixtral: Path
) -> None:
    """With copies nobody loads anything; without, what nobody holds is read again. Either way the text is the same."""
    opened = descriptors()
    running = lose_and_come_back(how, redundant, compiled, mixtral)
    assert not any(map(exists, running))
    gc.collect()  # maps of memory are closed with the tensors in it
    assert descriptors() - opened == Counter()


def lose_and_come_back(how: signal.Signals, redundant: int, compiled: bool, folder: Path) -> set[int]:
    """All processes that were ranks."""
    reference = Side(compiled_alone(folder) if compiled else alone(folder))
    with spread_over(folder, RANKS, deadline=3.0, redundant=redundant) as spread:
        group = Side(group_forward(spread, compiled=compiled))
        victim, *rest = pids(spread)
        for layer_done in (None, harmed(victim, how), None):
            group.step(ALL, layer_done)
            reference.step(ALL)
        counts = spread.ranks.counts
        left = spread.ranks.size - counts.admitted  # it is back within a step where nothing else keeps the cores
        assert (left, counts.losses, counts.repeated_steps) == (RANKS - 1, 1, 1)
        assert (counts.loaded_experts > 0) == (redundant == 0)
        assert not exists(victim), "who was given up is dead: it could write KV otherwise"
        until_back(spread, group, reference)
        for _ in range(2):
            group.step(ALL)
            reference.step(ALL)
        assert group.tokens == reference.tokens
        assert (counts.losses, counts.admitted, spread.ranks.lost) == (1, 1, None)
        return {victim, *rest, *pids(spread)}


def descriptors() -> Counter[str]:
    """What this process has open."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found[os.readlink(entry)] += 1  # noqa: PTH115 - a pipe has no path
    return found


def test_mistakes_over_rows_cost_no_rank(mixtral: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the leader's, which leaves a step, nor another rank's, which says so: the engine looks whose they are."""
    reference = Side(alone(mixtral))
    with spread_over(mixtral, 2) as spread:
        group = Side(group_forward(spread))
        good = group.tokens[0][0]
        group.tokens[0][0] = 10**9  # no token of the model
        with pytest.raises(IndexError):
            group.step([0])  # a sequence alone is the leader's
        with pytest.raises(RuntimeError, match="IndexError"):
            group.step([0, 1, 2])  # the longest is the leader's, who has one at least; the next another's
        assert f"{logs.current_setup().name}/rank-1 [" in capfd.readouterr().err, "whose rank it was is told"
        others, group.tokens[2][0] = group.tokens[2][0], 10**9
        with pytest.raises(IndexError):
            group.step([0, 1, 2])  # both make one
        group.tokens[0][0], group.tokens[2][0] = good, others
        group.step(ALL)
        reference.step(ALL)
        assert group.tokens == reference.tokens
        assert (spread.ranks.counts.losses, spread.ranks.size) == (0, 2)
        os.kill(*pids(spread), signal.SIGKILL)
        group.step([3])  # whose loss is no mistake over this
        reference.step([3])
        assert group.tokens == reference.tokens


def test_a_rank_that_ends_in_the_meeting_is_not_waited_for(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All begin by it, the leader last: its process is known to them before they meet."""
    with spread_over(mixtral, RANKS) as spread:
        victim, begin = pids(spread)[-1], EpochMember.begin

        def harmed_first(member: EpochMember, order: BeginEpoch) -> None:
            os.kill(victim, signal.SIGKILL)
            begin(member, order)

        monkeypatch.setattr(EpochMember, "begin", harmed_first)
        monkeypatch.setattr(GroupEpochs, "_begin", stopping_first(victim, GroupEpochs._begin))
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"do not come together: rank 2 .* its process has ended"):
            group_forward(spread)
        assert time.monotonic() - began < MEETING_SECONDS / 2


def stopping_first(victim: int, begin: Callable[[GroupEpochs, BeginEpoch], None]) -> Callable[..., None]:
    """So that it does not come to the meeting before it is killed."""

    def stopped(epochs: GroupEpochs, order: BeginEpoch) -> None:
        stop(victim)
        begin(epochs, order)

    return stopped


@pytest.mark.slow
def test_a_leader_that_loses_everybody_goes_on_alone(mixtral: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = Side(alone(mixtral))
    with spread_over(mixtral, RANKS) as spread:
        group = Side(group_forward(spread))
        for pid in pids(spread):
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            group.step(ALL)
            reference.step(ALL)
        assert re.search(r"goes on with rank 0, \d", caplog.text)  # the others may be back already
        until_back(spread, group, reference)
        assert group.tokens == reference.tokens


@pytest.mark.slow
def test_experts_that_cannot_be_had_end_the_group(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with spread_over(mixtral, 2) as spread:
        group = Side(group_forward(spread))
        group.step(ALL)

        def load(layer: int, expert: int) -> None:
            raise OSError(f"no expert {expert} of layer {layer}")

        monkeypatch.setattr(spread.ranks.own.experts, "load", load)
        os.kill(*pids(spread), signal.SIGKILL)
        with pytest.raises(ExpertsLost, match="no expert"):
            group.step(ALL)
        with pytest.raises(ExpertsLost):
            group.step(ALL)
