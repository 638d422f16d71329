"""A rank's process is started again when it has ended, whatever comes between, until it is given up."""

from __future__ import annotations

import threading
import time
from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest

from serving.expert_parallel.exchange import RankLost
from serving.rank_group import child, restarts
from serving.rank_group.child import RankProcess
from serving.rank_group.restarts import (
    FIRST_DELAY,
    LASTING_SECONDS,
    LONGEST_DELAY,
    LONGEST_HOST_DELAY,
    MOST_RESTARTS,
    RankKeeper,
    RestartDelays,
)
from tests.fakes.forks import no_fork

JOIN_SECONDS = 60.0  # that a busy machine may need


def test_restarts_are_bounded_and_come_later_and_later() -> None:
    delays = RestartDelays()
    found = [delay for _ in range(MOST_RESTARTS) if (delay := delays.after(0.0)) is not None]
    assert len(found) == MOST_RESTARTS
    assert found[0] == 0.0
    assert found[1] == FIRST_DELAY
    assert found == sorted(found)
    assert max(found) <= LONGEST_DELAY
    assert delays.after(0.0) is None
    assert delays.after(LASTING_SECONDS) == 0.0


def test_hosts_that_come_by_themselves_are_let_in_as_often_as_they_come() -> None:
    delays = RestartDelays(None, LONGEST_HOST_DELAY)
    assert [delays.after(0.0) for _ in range(2000)][-1] == LONGEST_HOST_DELAY


class ToldProcess:
    """A rank's process that has ended, or ends when it is told to."""

    def __init__(self, rank: int, *, ended: bool) -> None:
        self.rank, self.ended, self.called = rank, threading.Event(), f"rank {rank}"
        self.process = SimpleNamespace(wait=self._wait, kill=self.ended.set)
        self.channel = SimpleNamespace(close=self.ended.set)
        if ended:
            self.ended.set()

    def _wait(self, _: float | None = None) -> int:
        assert self.ended.wait(JOIN_SECONDS)
        return 1

    def end(self, _: float) -> None:
        self.ended.set()


def keeper_of(first: ToldProcess, prepare: object) -> RankKeeper:
    return RankKeeper(cast(RankProcess, first), prepare)  # type: ignore[arg-type]


@pytest.fixture
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(restarts, "LONGEST_DELAY", 0.001)


@pytest.mark.usefixtures("in_haste")
def test_a_host_that_has_no_process_left_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, ready = count(1), threading.Event()

    def start(rank: int) -> ToldProcess:
        if next(attempts) < 3:
            raise BlockingIOError("no process is left")
        return ToldProcess(rank, ended=False)

    monkeypatch.setattr(restarts, "RankProcess", start)
    keeper = keeper_of(ToldProcess(1, ended=True), lambda _: ready.set())
    keeper.start()
    assert ready.wait(JOIN_SECONDS)
    keeper.closing()
    keeper.close(0.0)


@pytest.mark.usefixtures("in_haste")
@pytest.mark.parametrize("fails", [False, True], ids=["ends once loaded", "does not load"])
def test_a_long_load_is_no_lasting_process(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that ends whenever it has loaded would be started again and again, for ever."""
    started: list[ToldProcess] = []
    clock = [0.0]

    def start(rank: int) -> ToldProcess:
        assert len(started) < 2 * MOST_RESTARTS, "it is started again and again"
        started.append(ToldProcess(rank, ended=True))
        return started[-1]

    def load(_: object) -> None:
        clock[0] += 2 * LASTING_SECONDS
        if fails:
            raise RankLost(1, "it has ended")

    monkeypatch.setattr(restarts, "RankProcess", start)
    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    keeper = keeper_of(ToldProcess(1, ended=True), load)
    keeper.start()
    thread = keeper._thread
    assert thread is not None
    thread.join(JOIN_SECONDS)
    assert not thread.is_alive()
    assert len(started) == MOST_RESTARTS
    keeper.closing()
    keeper.close(0.0)


@pytest.mark.parametrize("lasts", [0.1, 2 * LASTING_SECONDS])
def test_a_host_that_fails_its_first_step_again_and_again_is_let_in_less_and_less_often(
    lasts: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it had waited for that step. One that has computed for a while is let in at once."""
    clock, pauses, done = [0.0], list[float](), threading.Event()
    came: list[ToldProcess] = []

    def start(rank: int, pause: float) -> RankProcess:
        pauses.append(pause)
        if len(pauses) > 2 * MOST_RESTARTS:
            done.set()
            raise RankLost(rank, "the group is closing")
        came.append(ToldProcess(rank, ended=False))
        return cast(RankProcess, came[-1])

    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    keeper = RankKeeper(cast(RankProcess, ToldProcess(2, ended=True)), lambda _: None, start)
    keeper.start()
    until = time.monotonic() + JOIN_SECONDS
    while not done.is_set():
        assert time.monotonic() < until, "it is not let in again"
        if keeper.offers:
            clock[0] += 10 * LASTING_SECONDS  # nobody wants a step
            found = keeper.taken()
            clock[0] += lasts
            cast(ToldProcess, found).ended.set()
    keeper.closing()
    keeper.close(0.0)
    if lasts > LASTING_SECONDS:
        assert set(pauses) == {0.0}
    else:
        assert pauses[:3] == [0.0, FIRST_DELAY, 2 * FIRST_DELAY]
        assert pauses == sorted(pauses) and pauses[-1] == LONGEST_HOST_DELAY > LONGEST_DELAY
    assert "started again" not in caplog.text, "nothing is started here"


def test_a_process_that_cannot_be_started_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket would be told of as one that nobody has closed."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(child._forks, "server", lambda environ: SimpleNamespace(start=no_fork))
    monkeypatch.setattr(child.subprocess, "Popen", refuse)
    with pytest.raises(BlockingIOError):
        RankProcess(1)
