"""Which hosts a leader takes in, for which places, and that one of them can come again. They have no model here."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from serving.expert_parallel.exchange import RankLost
from serving.rank_group.host_bridge import MOST_STRANGERS
from serving.rank_group.host_door import HostIdentity, HostNotYet, HostSecurity, HostUnproven, joined
from serving.rank_group.host_line import MOST_TOLD, HostLine, ToldOnce
from serving.rank_group.host_lobby import HostLobby
from serving.rank_group.host_plan import HostPlace

OWN = HostIdentity(version="1", model="0" * 32, dtype="float32", ranks=4, kernels="2" * 64)
KEY = HostSecurity(cluster_key="the key")
SECONDS = 120.0  # that a busy machine may need to start a process
LATER = HostPlace(3, 1)
TIMES = 4  # that those ask who are not to come in, of as many as they like


class Lobby(HostLobby):
    """One that hosts of this process find."""

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = listening.getsockname()[1]
        super().__init__(listening, OWN, KEY, 2)

    def join(self, place: HostPlace) -> HostLine:
        return joined("127.0.0.1", self.port, KEY, OWN, place, SECONDS)

    def joined_at_last(self, place: HostPlace) -> HostLine:
        """Asks until it is taken, as hosts do."""
        until = time.monotonic() + SECONDS
        while True:
            try:
                return self.join(place)
            except HostNotYet:
                assert time.monotonic() < until
                time.sleep(0.05)


@pytest.fixture
def lobby() -> Iterator[Lobby]:
    made = Lobby()
    yield made
    made.close()


def test_hosts_come_in_any_order_have_places_of_their_own_and_come_again(lobby: Lobby) -> None:
    with ThreadPoolExecutor(2) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        with pytest.raises(HostNotYet, match="ranks 2 to 3 are those of other hosts"):
            lobby.join(HostPlace(1, 1))
        last = lobby.join(LATER)
        with pytest.raises(HostNotYet, match="another one has rank 3"):
            lobby.join(HostPlace(2, 2))
        first = lobby.join(HostPlace(2, 1))
        assert [process.rank for process in gathered.result()] == [2, 3]
        assert lobby.places == [HostPlace(2, 1), LATER]
        processes = lobby.handed_over()
        last.close()
        processes[1].process.wait(SECONDS)
        assert processes[0].process.poll() is None, "one host's end is not another's"
        again = pool.submit(lobby.again, 3, 0.0)
        with pytest.raises(HostNotYet, match="misses no such host"):
            lobby.join(HostPlace(2, 1))
        last = lobby.joined_at_last(LATER)
        found = again.result()
        assert found.rank == 3 and found.process.poll() is None
        for line, process in ((first, processes[0]), (last, found)):
            line.close()
            process.end(time.monotonic() + SECONDS)
            process.channel.close()
        processes[1].channel.close()


def test_a_host_that_is_lost_before_all_have_come_is_waited_for_again(lobby: Lobby) -> None:
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        lobby.join(LATER).close()
        again = lobby.joined_at_last(LATER)
        first = lobby.join(HostPlace(2, 1))
        assert all(process.process.poll() is None for process in gathered.result())
        for line in (again, first):
            line.close()


def test_a_host_that_is_lost_again_and_again_is_let_in_after_a_pause(
    lobby: Lobby, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told so, and so is who reads the log of either; once, however often it asks."""
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        lines = [lobby.joined_at_last(place) for place in (HostPlace(2, 1), LATER)]
        gathered.result()
        first, last = lobby.handed_over()
        lines[1].close()
        last.process.wait(SECONDS)
        last.channel.close()
        began, pause = time.monotonic(), 10.0  # more than a busy machine takes to start a process
        again = pool.submit(lobby.again, 3, pause)
        with pytest.raises(HostNotYet, match="not for the first time; it is let in after a pause of 10 s"):
            lobby.join(LATER)
        line = lobby.joined_at_last(LATER)
        assert time.monotonic() - began >= pause
        found = again.result()
        told = [message for message in caplog.messages if "not for the first time" in message]
        assert len([message for message in told if "is not taken in" in message]) == 1
        assert len([message for message in told if "in 10.0 s at the earliest" in message]) == 1
        for each, process in ((lines[0], first), (line, found)):
            each.close()
            process.end(time.monotonic() + SECONDS)
            process.channel.close()


def test_strangers_who_say_nothing_keep_no_host_out(lobby: Lobby) -> None:
    silent = [socket.create_connection(("127.0.0.1", lobby.port)) for _ in range(8 * MOST_STRANGERS)]
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        began = time.monotonic()
        lines = [lobby.joined_at_last(place) for place in (HostPlace(2, 1), LATER)]
        assert len(gathered.result()) == 2
        assert time.monotonic() - began < SECONDS / 2
    for each in (*lines, *silent):
        each.close()


def test_nobody_waits_for_hosts_of_a_group_that_closes(lobby: Lobby) -> None:
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        line = lobby.join(LATER)
        lobby.close()
        with pytest.raises(RankLost, match="the group is closing"):
            gathered.result()
        line.close()


def test_of_two_that_are_waited_for_neither_breaks_as_the_group_closes(lobby: Lobby) -> None:
    """The second comes to the door when the listening socket has been closed."""
    lobby.places = [HostPlace(2, 1), LATER]
    with ThreadPoolExecutor(1) as pool:
        lobby._door.acquire()  # the first has it
        again = pool.submit(lobby.again, 3)
        while LATER not in lobby._missed:
            time.sleep(0.001)
        time.sleep(0.01)  # it waits for the door
        lobby._closing.set()  # as close() does, which comes to the door before it
        lobby._listening.close()
        lobby._door.release()
        with pytest.raises(RankLost, match="closing"):
            again.result(SECONDS)


def test_hosts_are_waited_for_no_longer_than_is_said(lobby: Lobby) -> None:
    with pytest.raises(RankLost, match="no host has come with ranks 2, 3"):
        lobby.gather(0.1)


def test_hosts_that_ask_in_turn_are_told_of_once_each(lobby: Lobby, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        for _ in range(TIMES):
            for place in (HostPlace(1, 1), HostPlace(3, 5)):
                with pytest.raises(HostNotYet):
                    lobby.join(place)
        lobby.close()
        with suppress(RankLost):
            gathered.result()
    assert len([message for message in caplog.messages if "is not taken in" in message]) == 2


def test_strangers_are_told_of_once_with_their_address(lobby: Lobby, capfd: pytest.CaptureFixture[str]) -> None:
    """A host with a wrong key asks every five seconds, and those who only look whether somebody listens do so too."""
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        for _ in range(TIMES):
            with pytest.raises(HostUnproven):
                joined("127.0.0.1", lobby.port, HostSecurity(cluster_key="another"), OWN, LATER, SECONDS)
            with socket.create_connection(("127.0.0.1", lobby.port)) as looking:
                HostLine(looking).answer("greeting", SECONDS)
        lobby.joined_at_last(LATER).close()  # after them
        lobby.close()
        with suppress(RankLost):
            gathered.result()
    told = [line for line in capfd.readouterr().err.splitlines() if "is not taken in" in line]
    assert len(told) == 2 and all("/door" in line and "the host at 127.0.0.1:" in line for line in told), told
    assert sorted("cluster key" in line for line in told) == [False, True]


def test_what_is_told_is_remembered_up_to_a_bound() -> None:
    told = ToldOnce()
    assert [told.is_new(number % 2) for number in range(TIMES)] == [True, True, False, False]
    assert all(told.is_new(("another", number)) for number in range(MOST_TOLD))
    assert not told.is_new(("another", 0)) and told.is_new(0), "the oldest is forgotten"
    assert len(told._told) == MOST_TOLD


def test_logs_call_a_host_by_its_ranks(lobby: Lobby, capfd: pytest.CaptureFixture[str]) -> None:
    """And not by what was missing when its process began to wait: that of rank 3 comes first here."""
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(lobby.gather, SECONDS)
        lines = [lobby.joined_at_last(place) for place in (LATER, HostPlace(2, 1))]
        first, last = gathered.result()
        assert [first.called, last.called] == ["the host of rank 2", "the host of rank 3"]
        for line, process in zip(lines, (last, first), strict=True):
            line.close()
            process.process.wait(SECONDS)
    told = [line for line in capfd.readouterr().err.splitlines() if "is lost: " in line]
    for line, rank in zip(told, (3, 2), strict=True):
        assert f"rank-{rank} " in line and f"the host of rank {rank} is lost" in line, told
