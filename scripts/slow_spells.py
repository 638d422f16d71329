"""Spells in which a machine computes much more slowly than it does, whoever asks it to.

The host of a virtual machine may hold it up and not tell it: then the CPU time of whatever runs grows as the time by
the clock does, and a step of a measurement takes many times as long for no reason in what is measured. So a small
process on each core does the same work again and again, in the caches, and notes how much CPU time that takes: about
1 % of a core, more in a spell. What is measured can make that work a few times slower (by interrupts, and by sharing a
core), on the cores that it uses. A spell is what makes it SLOWER times as slow on two cores at once, where there are
two.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self

PERIOD = 0.02  # seconds between two looks
BLOCK, HASHES = bytes(16 * 1024), 8  # are hashed in each: a tenth of a millisecond
SLOWER = 10.0  # times the usual CPU time of a look, from which on it is a slow one: 15 to 357 were seen in spells

Look = tuple[float, float, float]
"""(Began and ended, by the monotonic clock; seconds of CPU time.)"""


class SlowSpells:
    """Watches every core that this process may run on while it is entered; `found` is there once it has been left.

    Enter it before what is measured begins: its processes have started by then, and load what the main module imports.
    """

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self.since = 0.0  # by the monotonic clock: looks before it do not count
        self._watching: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for core in sorted(os.sched_getaffinity(0)):
            ours, theirs = context.Pipe()
            process = context.Process(target=watch, args=(theirs, core), daemon=True)
            process.start()
            theirs.close()
            self._watching.append((process, ours))
        for _, connection in self._watching:
            connection.recv()
        return self

    def __exit__(self, *_: object) -> None:
        """Raises EOFError or OSError where a process that watches has died."""
        try:
            for _, connection in self._watching:
                connection.send(None)
            looks: list[list[Look]] = [connection.recv() for _, connection in self._watching]
            self.found = spells([[look for look in core if look[0] >= self.since] for core in looks])
        finally:
            for process, connection in self._watching:
                process.kill()
                process.join()
                connection.close()

    @property
    def seconds(self) -> float:
        """Of all looks in spells, on all cores: there was a spell for about so long."""
        return sum(ended - began for began, ended in self.found)

    def during(self, began: float, seconds: float) -> bool:
        """True if there was a spell then, by the monotonic clock. It need not be all that made a step longer."""
        after = bisect_left(self.found, (began + seconds,))
        return any(ended > began for _, ended in self.found[:after])


def spells(looks: Sequence[Sequence[Look]]) -> list[tuple[float, float]]:
    """When cores computed slowly, in order: each look that was slow while one of another core was, give or take PERIOD.

    A look that waited for its core counts as long as it had it.
    """
    slow = list[list[tuple[float, float]]]()
    for core in looks:
        usual = statistics.median(cpu for _, _, cpu in core) if core else 0.0
        slow.append([(ended - min(cpu, ended - began), ended) for began, ended, cpu in core if cpu > SLOWER * usual])
    found = list[tuple[float, float]]()
    for number, core in enumerate(slow):
        others = [look for other, each in enumerate(slow) if other != number for look in each]
        found += [one for one in core if len(slow) == 1 or any(_near(one, other) for other in others)]
    return sorted(found)


def _near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] + PERIOD and other[0] < one[1] + PERIOD


def watch(connection: Connection, core: int) -> None:
    """Say that it begins, look until something is said, then send the looks."""
    os.sched_setaffinity(0, {core})
    looks = list[Look]()
    connection.send(None)
    while not connection.poll(PERIOD):
        began, cpu = time.monotonic(), time.thread_time()
        for _ in range(HASHES):
            hashlib.sha256(BLOCK).digest()
        looks.append((began, time.monotonic(), time.thread_time() - cpu))
    connection.send(looks)
