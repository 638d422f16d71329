"""Steps of processes that only compute and meet."""

from __future__ import annotations

import threading

from scripts.spinning_steps import APART, meet, spinning


def test_all_processes_do_the_same_steps_and_each_takes_as_long_as_its_work() -> None:
    one, other = spinning(processes=2, milliseconds=5.0, megabytes=0.0, seconds=0.2)
    assert len(one) == len(other) >= 1
    assert min(one) > 0.002, "less than half of the work that a step is to be"
    assert sum(one) > 0.19


def test_what_is_read_of_memory_takes_as_long_as_it_is_much() -> None:
    read = [min(spinning(processes=1, milliseconds=0.0, megabytes=each, seconds=0.3)[0]) for each in (1.0, 100.0)]
    assert read[1] > 10 * read[0] and read[1] > 100e6 / 500e9, "no core reads 500 GB in a second"


def test_nobody_goes_on_before_the_last_has_come() -> None:
    told, passed = [0] * (3 * APART + 1), threading.Event()
    told[APART] = 1

    def first() -> None:
        meet(told, 0, 1)
        passed.set()

    waiting = threading.Thread(target=first)
    waiting.start()
    assert not passed.wait(0.05), "the third has not come"
    told[2 * APART] = 1
    waiting.join(10.0)
    assert passed.is_set()
