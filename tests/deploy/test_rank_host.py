"""How a host of ranks asks to be let in: on and on, until it is, or the leader itself refuses it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from deploy import rank_host
from deploy.rank_host import LONGEST_PAUSE, UNPROVEN_SECONDS, taken_in
from serving.rank_group.host_door import HostNotYet, HostRefused, HostUnproven
from serving.rank_group.host_line import HostLine

LINE = cast(HostLine, object())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes while a host pauses."""
    now = [1000.0]

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= LONGEST_PAUSE
        now[0] += seconds

    monkeypatch.setattr(rank_host, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


def answers(*given: Exception | HostLine) -> Callable[[], HostLine]:
    """What a leader says, time after time, the last for ever."""
    left: Iterator[Exception | HostLine] = iter(given)
    last = given[-1]

    def join() -> HostLine:
        found = next(left, last)
        if isinstance(found, Exception):
            raise found
        return found

    return join


def test_a_leader_that_is_away_is_asked_until_it_is_there(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert taken_in(answers(*[HostNotYet("nobody answers")] * 1000, LINE), "leader:1") is LINE
    assert clock[0] > 1000 + 900 * LONGEST_PAUSE
    assert [record.message.count("nobody answers") for record in caplog.records] == [1]


@pytest.mark.usefixtures("clock")
def test_a_refusal_of_the_leader_ends_a_host_at_once() -> None:
    with pytest.raises(ValueError, match="the leader at leader:1 does not take this host: its model's files"):
        taken_in(answers(HostRefused("its model's files are others"), LINE), "leader:1")


@pytest.mark.usefixtures("clock")
def test_who_has_taken_the_leaders_place_for_a_while_ends_no_host(caplog: pytest.LogCaptureFixture) -> None:
    """It is told of once, whatever they say, and what to look at."""
    caplog.set_level(logging.INFO)
    said = [HostUnproven(f"go away, for the {number}th time") for number in range(20)]
    assert taken_in(answers(*said, LINE), "leader:1") is LINE
    [told] = caplog.messages
    assert "the same one" in told and "trying on for 300 s" in told


def test_a_key_that_stays_wrong_ends_a_host_in_the_end(clock: list[float]) -> None:
    with pytest.raises(ValueError, match=r"have the same one.*missing or wrong"):
        taken_in(answers(HostUnproven("the cluster key is missing or wrong")), "leader:1")
    assert UNPROVEN_SECONDS <= clock[0] - 1000 <= UNPROVEN_SECONDS + LONGEST_PAUSE


def test_those_who_come_and_go_are_waited_out_each_for_themselves(clock: list[float]) -> None:
    stranger = [HostUnproven("go away")] * int(UNPROVEN_SECONDS / LONGEST_PAUSE - 1)
    away = HostNotYet("nobody answers")
    assert taken_in(answers(*stranger, away, *stranger, away, *stranger, LINE), "leader:1") is LINE
    assert clock[0] - 1000 > 2 * UNPROVEN_SECONDS
