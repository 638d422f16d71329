"""Spells in which a machine computes slowly are found by work that always takes the same."""

from __future__ import annotations

import os
import time

import pytest

from scripts.slow_spells import PERIOD, SLOWER, SlowSpells, spells

USUAL = 1e-4


def test_looks_that_took_much_more_than_is_usual_on_their_core_are_found_in_order() -> None:
    quick = [(0.02 * number, 0.02 * number + USUAL, USUAL) for number in range(100)]
    slow_core = [(began, began + 9 * USUAL, 9 * USUAL) for began, _, _ in quick]
    slow = (0.501, 0.551, (SLOWER + 0.1) * USUAL)
    not_yet = (0.701, 0.751, (SLOWER - 0.1) * USUAL)
    late = (0.101, 0.201, 99 * USUAL)
    assert spells([[*quick, slow, not_yet], [*slow_core, late], []]) == [late[:2], slow[:2]]


def test_what_overlaps_with_a_spell_is_in_it() -> None:
    slow = SlowSpells()
    slow.found = [(1.0, 3.0), (1.5, 1.6), (5.0, 5.5)]
    assert slow.during(0.5, 0.6) and slow.during(2.9, 9.0) and slow.during(2.0, 0.1) and slow.during(5.4, 0.01)
    assert not slow.during(0.5, 0.4) and not slow.during(3.1, 1.8) and not slow.during(5.6, 1.0)


def test_every_core_is_watched_for_as_long_as_it_is_entered() -> None:
    with SlowSpells() as slow:
        watching = [process for process, _ in slow._watching]
        assert len(watching) == len(os.sched_getaffinity(0))
        time.sleep(10 * PERIOD)
    assert not any(process.is_alive() for process in watching)
    assert all(ended > began for began, ended in slow.found)


def test_one_that_watches_and_has_died_is_told() -> None:
    with pytest.raises((EOFError, BrokenPipeError, ConnectionResetError)), SlowSpells() as slow:
        slow._watching[0][0].kill()
        slow._watching[0][0].join()
    assert not any(process.is_alive() for process, _ in slow._watching)
