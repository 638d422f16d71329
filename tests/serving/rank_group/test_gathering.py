"""Hosts that are lost before there is a group are waited for, however they are lost; the leader's own ranks are not.

Those that are lost together come again beside each other, each in a time of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from serving.expert_parallel.exchange import RankLost
from serving.rank_group import gathering as gathering_module
from serving.rank_group.child import RankProcess
from serving.rank_group.gathering import Gathering
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.restarts import RankKeeper

LOCAL = 2
SECONDS = 60.0
WAIT_SECONDS = 30.0


class ToldProcess:
    """A rank's process, the nth of its place, which ends when it is told to."""

    def __init__(self, rank: int, number: int = 1) -> None:
        self.rank, self.number, self.ended = rank, number, False
        self.called = f"rank {rank}" if rank < LOCAL else f"the host of rank {10 * rank}"
        self.process = SimpleNamespace(poll=lambda: 1 if self.ended else None, kill=self.end)

    def end(self) -> None:
        self.ended = True

    def kill(self, _: float) -> None:
        self.ended = True


class ToldLobby:
    """Hosts come again at once, until it is too late."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.late = False
        self.closed = threading.Event()

    def again(self, rank: int, *, until: float) -> RankProcess:
        assert until <= time.monotonic() + SECONDS
        if self.late:
            raise RankLost(rank, "its host has not come again")
        self.came.append(rank)
        return cast(RankProcess, ToldProcess(rank, 2))

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def lobby() -> ToldLobby:
    return ToldLobby()


@pytest.fixture
def gathering(lobby: ToldLobby) -> Gathering:
    return Gathering(cast(HostLobby, lobby), LOCAL)


@pytest.fixture
def keepers() -> list[RankKeeper]:
    return [RankKeeper(cast(RankProcess, ToldProcess(rank)), lambda _: None) for rank in (1, 2, 3)]


def told(keeper: RankKeeper) -> ToldProcess:
    return cast(ToldProcess, keeper.current)


def heard(log: list[tuple[int, str]], what: str) -> Callable[[RankProcess], None]:
    def does(process: RankProcess) -> None:
        if cast(ToldProcess, process).ended:
            raise RankLost(process.rank, "it has ended")
        log.append((process.rank, what))

    return does


def test_a_host_that_is_lost_is_asked_anew_when_it_has_come_again(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper], caplog: pytest.LogCaptureFixture
) -> None:
    log: list[tuple[int, str]] = []
    told(keepers[2]).end()
    gathering.hear_each(keepers, heard(log, "heard"), heard(log, "anew"), SECONDS)
    assert log == [(1, "heard"), (2, "heard"), (3, "anew")]
    assert [told(keeper).number for keeper in keepers] == [1, 1, 2] and lobby.came == [3]
    assert caplog.messages == ["the host of rank 30 is lost, before there is a group: it has ended"]


def test_a_host_that_is_lost_once_it_has_been_heard_is_waited_for_too(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper]
) -> None:
    """Others may load for minutes after it has."""
    log: list[tuple[int, str]] = []

    def hear(process: RankProcess) -> None:
        heard(log, "heard")(process)
        if process.rank == 3:
            told(keepers[1]).end()

    def anew(process: RankProcess) -> None:
        heard(log, "anew")(process)
        if len(lobby.came) == 1:
            told(keepers[2]).end()

    gathering.hear_each(keepers, hear, anew, SECONDS)
    assert log[3:] == [(2, "anew"), (3, "anew")]
    assert [told(keeper).ended for keeper in keepers] == [False] * 3


def test_a_host_that_fails_again_and_again_is_waited_for_until_it_is_too_late(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper]
) -> None:
    told(keepers[1]).end()

    def anew(process: RankProcess) -> None:
        lobby.late = len(lobby.came) == 5
        raise RankLost(process.rank, "it has ended")

    with pytest.raises(RankLost, match="has not come again"):
        gathering.hear_each(keepers, heard([], "heard"), anew, SECONDS)
    assert lobby.came == [2] * 5


def test_a_host_that_says_what_is_wrong_ends_the_start(gathering: Gathering, keepers: list[RankKeeper]) -> None:
    def hear(process: RankProcess) -> None:
        raise ValueError(f"rank {process.rank}: no memory")

    with pytest.raises(ValueError, match="no memory"):
        gathering.hear_each(keepers, hear, hear, SECONDS)


def test_a_rank_of_the_leaders_own_host_that_is_lost_ends_the_start(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper]
) -> None:
    told(keepers[0]).end()
    for call in (
        lambda: gathering.hear_each(keepers, heard([], "heard"), heard([], "anew"), SECONDS),
        lambda: gathering.ask_each([keeper.current for keeper in keepers], heard([], "asked")),
    ):
        with pytest.raises(RankLost):
            call()
    assert not lobby.came


def test_a_host_that_takes_no_word_is_not_heard_for_minutes(gathering: Gathering, keepers: list[RankKeeper]) -> None:
    """It may be there and late: who was not asked answers nothing."""

    def ask(process: RankProcess) -> None:
        if process.rank == 2:
            raise RankLost(2, "it has not answered within 60 s")

    gathering.ask_each([keeper.current for keeper in keepers], ask)
    assert [told(keeper).ended for keeper in keepers] == [False, True, False]


def test_hosts_that_are_lost_together_come_and_load_beside_each_other(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is waited for is let in: each is to be, however long the others take."""
    waited_for, loading, come = threading.Barrier(2), threading.Barrier(2), lobby.again

    def again(rank: int, *, until: float) -> RankProcess:
        waited_for.wait(WAIT_SECONDS)
        return come(rank, until=until)

    def load(_: RankProcess) -> None:
        loading.wait(WAIT_SECONDS)

    monkeypatch.setattr(lobby, "again", again)
    for keeper in keepers[1:]:
        told(keeper).end()
    gathering.hear_each(keepers, heard([], "heard"), load, SECONDS)
    assert sorted(lobby.came) == [2, 3]


def test_a_host_that_is_lost_while_others_come_again_is_waited_for_beside_them(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper]
) -> None:
    third_came = threading.Event()

    def anew(process: RankProcess) -> None:
        if process.rank == 3:
            third_came.set()
            return
        told(keepers[2]).end()
        assert third_came.wait(WAIT_SECONDS)

    told(keepers[1]).end()
    gathering.hear_each(keepers, heard([], "heard"), anew, SECONDS)
    assert lobby.came == [2, 3]


def test_each_host_has_its_time_from_when_it_was_found_to_be_lost(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have loaded until just before it was too late; one that is lost again has what is left."""
    now, untils = [1000.0], list[tuple[int, float]]()
    monkeypatch.setattr(gathering_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def again(rank: int, *, until: float) -> RankProcess:
        untils.append((rank, until))
        return cast(RankProcess, ToldProcess(rank, 2))

    monkeypatch.setattr(lobby, "again", again)
    failed = threading.Event()

    def hear(process: RankProcess) -> None:
        if process.rank == 2:
            now[0] += SECONDS - 1
            told(keepers[2]).end()
        heard([], "heard")(process)

    def anew(process: RankProcess) -> None:
        if not failed.is_set():
            failed.set()
            now[0] += 1
            raise RankLost(process.rank, "it has ended")

    gathering.hear_each(keepers, hear, anew, SECONDS)
    assert untils == [(3, 1000.0 + SECONDS - 1 + SECONDS)] * 2


def test_a_start_that_fails_waits_for_nobody(
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two hosts that come again one says what is wrong; the other is not there yet, or loads."""
    come = lobby.again

    def again(rank: int, *, until: float) -> RankProcess:
        if rank == 3 and lobby.came.count(3):
            assert lobby.closed.wait(WAIT_SECONDS)
            raise RankLost(rank, "the group is closing")
        return come(rank, until=until)

    def anew(process: RankProcess) -> None:
        if process.rank == 2:
            while not lobby.came.count(3):
                time.sleep(0.001)
            raise ValueError("rank 2: no memory")
        until = time.monotonic() + WAIT_SECONDS
        while not cast(ToldProcess, process).ended:
            assert time.monotonic() < until
            time.sleep(0.001)
        raise RankLost(process.rank, "it has ended")

    monkeypatch.setattr(lobby, "again", again)
    for keeper in keepers[1:]:
        told(keeper).end()
    with pytest.raises(ValueError, match="no memory"):
        gathering.hear_each(keepers, heard([], "heard"), anew, SECONDS)
    assert lobby.closed.is_set() and sorted(lobby.came) == [2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("host_")]
