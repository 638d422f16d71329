"""Spells in which a machine computes slowly are found by work that always takes the same."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import cast

import pytest

from scripts.slow_spells import PERIOD, SLOWER, Look, SlowSpells, spells, watch

USUAL = 1e-4


QUICK = [(0.02 * number, 0.02 * number + USUAL, USUAL) for number in range(100)]


def slow(began: float, times: float, waited: float = 0.0) -> Look:
    return began, began + waited + times * USUAL, times * USUAL


def test_a_spell_is_what_slows_two_cores_at_once() -> None:
    one = [*QUICK, slow(0.501, 300), slow(0.901, 300), slow(1.301, SLOWER - 1)]
    weak = [(began, began + 9 * USUAL, 9 * USUAL) for began, _, _ in QUICK]  # slow as such
    other = [*weak, slow(0.511, 900), slow(1.301, 900), slow(1.501, 900)]
    assert spells([one, other, []]) == [(0.501, 0.501 + 300 * USUAL), (0.511, 0.511 + 900 * USUAL)]
    assert len(spells([one])) == 2, "of a single core there is no other to be asked"


def test_waiting_for_a_core_is_no_spell() -> None:
    waiting = slow(0.501, 1, waited=0.3)
    assert spells([[*QUICK, waiting], [*QUICK, slow(0.6, 300)]]) == []
    began, ended = spells([[*QUICK, slow(0.501, 300, waited=0.3)]])[0]
    assert ended - began == pytest.approx(300 * USUAL)


def test_what_overlaps_with_a_spell_is_in_it() -> None:
    slow = SlowSpells()
    slow.found = [(1.0, 3.0), (1.5, 1.6), (5.0, 5.5)]
    assert slow.during(0.5, 0.6) and slow.during(2.9, 9.0) and slow.during(2.0, 0.1) and slow.during(5.4, 0.01)
    assert not slow.during(0.5, 0.4) and not slow.during(3.1, 1.8) and not slow.during(5.6, 1.0)


def test_looks_are_taken_on_the_core_that_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    core, before = max(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    bound = list[set[int]]()

    def run() -> None:
        watch(theirs, core)
        bound.append(os.sched_getaffinity(0))  # of this thread

    watching = threading.Thread(target=run)
    watching.start()
    assert ours.recv() is None
    time.sleep(10 * PERIOD)
    ours.send(None)
    looks = ours.recv()
    watching.join()
    assert bound == [{core}] and os.sched_getaffinity(0) == before
    assert looks
    assert all(ended > began and cpu > 0 for began, ended, cpu in looks)


def test_every_core_is_watched_for_as_long_as_it_is_entered() -> None:
    with SlowSpells() as slow:
        watching = [process for process, _ in slow._watching]
        assert len(watching) == len(os.sched_getaffinity(0))
        time.sleep(10 * PERIOD)
    assert not any(process.is_alive() for process in watching)
    assert all(ended > began for began, ended in slow.found)


@pytest.mark.parametrize(("since", "count"), [(0.0, 2), (0.55, 0)])
def test_looks_before_what_is_measured_do_not_count(since: float, count: int) -> None:
    watching = SlowSpells()
    watching.since = since
    ended = SimpleNamespace(kill=lambda: None, join=lambda: None)
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    for ours, theirs in pipes:
        theirs.send([*QUICK, slow(0.501, 300)])
        watching._watching.append((cast("BaseProcess", ended), ours))
    watching.__exit__()
    assert len(watching.found) == count


def test_one_that_watches_and_has_died_is_told() -> None:
    with pytest.raises((EOFError, OSError)), SlowSpells() as slow:
        slow._watching[0][0].kill()
        slow._watching[0][0].join()
    assert not any(process.is_alive() for process, _ in slow._watching)
