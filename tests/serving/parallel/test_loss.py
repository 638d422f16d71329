"""Whoever waits for a rank that is lost, or for one that waits for it, says which within the deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import cast

import pytest
from torch._C._distributed_c10d import Work
from torch.distributed import HashStore, TCPStore

from serving.expert_parallel.exchange import RankLost
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.waits import BoundedWaits
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from tests.fakes.awake import retaken
from tests.fakes.stopping import harm
from tests.serving.expert_parallel.ranks import Ranks, keep_store
from tests.serving.parallel.losing import RUNNING, step_until_lost

LAYOUT = ParallelLayout(tensor=2, pipeline=2)
VICTIM = 3  # rank 0 has no group with it


@pytest.mark.parametrize(("how", "deadline"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 3.0)], ids=str)
@retaken
def test_every_rank_names_the_one_that_is_lost(how: signal.Signals, deadline: float) -> None:
    with Ranks() as group:
        started = group.start_all(LAYOUT.ranks, step_until_lost, LAYOUT, deadline)
        assert [rank.answer() for rank in started] == [RUNNING] * LAYOUT.ranks
        began = time.monotonic()
        harm(started[VICTIM].pid, how)
        seen = [rank.answer() for rank in started if rank.rank != VICTIM]
    assert [lost for lost, _, _ in seen] == [VICTIM] * len(seen), seen
    if how is signal.SIGKILL:
        assert all(when - began < deadline / 2 for _, _, when in seen)  # long before the deadline
    else:
        assert any("deadline" in reason for _, reason, _ in seen)
        assert all(when - began > 0.4 * deadline for _, _, when in seen)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RankLost, match="not come") as lost:
        ParallelRank.join(ParallelLayout(tensor=2), 0, HashStore(), deadline=1.0, meeting=0.2)
    assert lost.value.rank == 1


class NeverDone:
    """An operation whose other ranks have stopped."""

    def wait(self, moment: timedelta) -> None:
        time.sleep(moment.total_seconds())
        raise RuntimeError("the time is up")


class DoneLate:
    """An operation that needs nobody any more, and that its thread has not come to yet."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def wait(self, moment: timedelta) -> None:
        self._looks -= 1
        if self._looks >= 0:
            time.sleep(moment.total_seconds())
            raise RuntimeError("the time is up")


class Broken:
    """An operation over a connection that its other rank has closed."""

    def wait(self, moment: timedelta) -> None:
        raise RuntimeError("Connection closed by peer. More advice")


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_rank_has_sent_before_it_left_is_waited_for() -> None:
    store = HashStore()
    BoundedWaits(store, 1, 2, ProcessWatch({}), deadline=60.0).close()
    waits = BoundedWaits(store, 0, 2, ProcessWatch({1: ended_process()}), deadline=60.0)
    waits.finish(cast(Work, DoneLate(3)))
    waits.close()


@pytest.mark.parametrize("work", [NeverDone(), Broken()], ids=["waits", "broken"])
def test_one_that_has_left_hides_no_other_that_is_lost(work: object) -> None:
    """Before, a connection that broke was the fault of one that had left, if anybody had."""
    store = HashStore()
    BoundedWaits(store, 1, 3, ProcessWatch({}), deadline=60.0).close()
    waits = BoundedWaits(store, 0, 3, ProcessWatch({1: ended_process(), 2: ended_process()}), deadline=60.0)
    with pytest.raises(RankLost) as lost:
        waits.finish(cast(Work, work))
    assert lost.value.rank == 2


def test_one_that_has_left_too_early_is_named() -> None:
    store = HashStore()
    BoundedWaits(store, 1, 3, ProcessWatch({}), deadline=60.0).close()
    waits = BoundedWaits(store, 0, 3, ProcessWatch({1: ended_process(), 2: os.getpid()}), deadline=60.0)
    with pytest.raises(RankLost, match="broken: Connection closed by peer") as lost:
        waits.finish(cast(Work, Broken()))
    assert lost.value.rank == 1


def test_a_rank_that_gives_up_does_not_say_that_it_leaves() -> None:
    store = HashStore()
    leaving = BoundedWaits(store, 1, 2, ProcessWatch({0: ended_process()}), deadline=60.0)
    with pytest.raises(RankLost):
        leaving.finish(cast(Work, NeverDone()))
    leaving.close()
    assert not store.check(["left/1"])


@retaken
def test_who_left_because_of_another_is_not_blamed() -> None:
    """Rank 1 waits for rank 2, which has stopped, and leaves; rank 0 sees that, and has no group with rank 2."""
    store, left = HashStore(), ended_process()
    for other in (0, 3):  # they say that they wait, too
        store.set(f"waiting/{other}", "")
    leaving = BoundedWaits(store, 1, 4, ProcessWatch({}), deadline=0.2)
    with pytest.raises(RankLost, match="deadline") as lost:
        leaving.finish(cast(Work, NeverDone()))
    assert lost.value.rank == 2
    staying = BoundedWaits(store, 0, 4, ProcessWatch({1: left}), deadline=60.0)
    with pytest.raises(RankLost, match="ended") as lost:
        staying.finish(cast(Work, NeverDone()))
    assert lost.value.rank == 2
    with pytest.raises(RankLost) as again:
        staying.begin(lambda: cast(Work, NeverDone()))
    assert (again.value.rank, again.value.reason) == (lost.value.rank, lost.value.reason)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
@retaken
def test_a_rank_that_takes_the_store_with_it_is_named(how: signal.Signals) -> None:
    with Ranks() as group:
        lost = group.start(1, keep_store)
        store = TCPStore("127.0.0.1", lost.answer(), is_master=False)
        waits = BoundedWaits(store, 0, 3, ProcessWatch({1: lost.pid}), deadline=0.3)
        harm(lost.pid, how)
        for _ in range(2):
            with pytest.raises(RankLost) as seen:
                waits.finish(cast(Work, NeverDone()))
            assert seen.value.rank == (1 if how is signal.SIGKILL else None)
        waits.close()
