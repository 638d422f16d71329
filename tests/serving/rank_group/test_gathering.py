"""Hosts that are lost before there is a group are waited for, however they are lost; the leader's own ranks are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.child import RankProcess
from serving.rank_group.gathering import Gathering
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.restarts import RankKeeper

LOCAL = 2
SECONDS = 60.0


class ToldProcess:
    """A rank's process, the nth of its place, which ends when it is told to."""

    def __init__(self, rank: int, number: int = 1) -> None:
        self.rank, self.number, self.ended = rank, number, False
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

    def again(self, rank: int, *, until: float) -> RankProcess:
        assert until <= time.monotonic() + SECONDS
        if self.late:
            raise RankLost(rank, "its host has not come again")
        self.came.append(rank)
        return cast(RankProcess, ToldProcess(rank, 2))


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
    gathering: Gathering, lobby: ToldLobby, keepers: list[RankKeeper]
) -> None:
    log: list[tuple[int, str]] = []
    told(keepers[2]).end()
    gathering.hear_each(keepers, heard(log, "heard"), heard(log, "anew"), SECONDS)
    assert log == [(1, "heard"), (2, "heard"), (3, "anew")]
    assert [told(keeper).number for keeper in keepers] == [1, 1, 2] and lobby.came == [3]


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
