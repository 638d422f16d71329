"""Lanes to ranks beside their steps: all have done a word when it is over, mistakes are told, a lost rank is final."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from serving.channel import Channel
from serving.expert_parallel.exchange import RankLost
from serving.rank_group.beside import Lanes, serve_lane
from serving.rank_group.child import RankLine

SECONDS = 20.0


def nothing() -> None: ...


def served(theirs: socket.socket, do: Callable[[Any], object]) -> None:
    with theirs:
        serve_lane(Channel(theirs), do)


@contextmanager
def lanes_to(*does: Callable[[Any], object], count: int = 1, seconds: float = SECONDS) -> Iterator[tuple[Lanes, list]]:
    """Lanes to ranks 1, 2, … that do so on threads of this process; and who was told of as lost."""
    lines: list[list[RankLine]] = []
    threads: list[threading.Thread] = []
    lost: list[RankLost] = []
    for _ in range(count):
        lines.append([])
        for rank, do in enumerate(does, 1):
            ours, theirs = Channel.pair()
            lines[-1].append(RankLine(rank, os.getpid(), ours))
            threads.append(threading.Thread(target=served, args=(theirs, do), daemon=True))
            threads[-1].start()
    try:
        yield Lanes(lines, seconds, lost.append), lost
    finally:
        for line in (line for lane in lines for line in lane):
            line.channel.close()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank's thread outlives its lane"


def test_all_that_are_asked_have_done_it_when_it_is_over() -> None:
    done: list[tuple[int, str]] = []

    def slowly(word: str) -> None:
        time.sleep(0.05)
        done.append((2, word))

    with lanes_to(lambda word: done.append((1, word)), slowly) as (lanes, _), lanes.one() as lane:
        lane.together({0, 1, 2}, "a", lambda: done.append((0, "a")))
        assert sorted(done) == [(0, "a"), (1, "a"), (2, "a")]
        lane.together([2], "b", nothing)
        assert done[3:] == [(2, "b")]


@pytest.mark.parametrize("where", ["a rank", "the leader"])
def test_a_mistake_is_told_and_the_lane_goes_on(where: str) -> None:
    """With no answer left over, which the next word would take for its own."""
    done: list[str] = []

    def refuse(word: str) -> None:
        if word == "wrong":
            raise ValueError("not that")
        done.append(word)

    def wrong() -> None:
        refuse("wrong")

    with lanes_to(refuse, done.append) as (lanes, lost), lanes.one() as lane:
        if where == "a rank":
            with pytest.raises(RuntimeError, match="rank 1: ValueError: not that"):
                lane.together([1, 2], "wrong", nothing)
        else:
            with pytest.raises(ValueError, match="not that"):
                lane.together([1, 2], "right", wrong)
        done.clear()
        lane.together([1, 2], "next", nothing)
        assert done == ["next", "next"] and not lost


def test_a_rank_that_is_late_is_lost_to_all_that_follow() -> None:
    """It may still be at the first word, whose place in memory another must not take."""
    release, begun = threading.Event(), list[str]()
    try:
        with lanes_to(lambda _: release.wait(SECONDS), seconds=0.1) as (lanes, lost):
            for word in ("first", "second", "third"):
                with pytest.raises(RankLost, match="rank 1"), lanes.one() as lane:
                    lane.together([1], word, lambda: begun.append(word))  # noqa: B023 - called before it is over
                if word == "second":
                    release.set()  # its late answer is nobody's
            assert begun == ["first"] and len(lost) == 1, "told once"
    finally:
        release.set()


def test_as_many_at_once_as_there_are_lanes() -> None:
    meeting = threading.Barrier(3)
    with lanes_to(lambda _: meeting.wait(SECONDS), count=3) as (lanes, _):
        numbers: list[int] = []

        def ask() -> None:
            with lanes.one() as lane:
                numbers.append(lane.number)
                lane.together([1], "a", nothing)

        with ThreadPoolExecutor(6) as threads:
            for done in [threads.submit(ask) for _ in range(6)]:
                done.result(SECONDS)
        assert sorted(numbers) == [0, 0, 1, 1, 2, 2] and not meeting.broken
