"""Through shared memory a rank that sleeps until all others have told is woken by the last, and by one that leaves.

It waits awake for as long as it is to.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from serving.expert_parallel.exchange import ExpertExchange, RankLost, Rows
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from tests.serving.expert_parallel.groups import SHAPE, Group

RANKS = 12
SLICE = 0.005  # seconds of sleep after which a rank looks at the others' processes
BESIDE = 4  # switches that returning to Python may add


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group("shared_memory", replace(SHAPE, ranks=RANKS))
    yield made
    made.close()


def begin(exchange: ExpertExchange) -> None:
    shape = exchange.shape
    exchange.begin_dispatch(Rows(torch.empty(0, shape.hidden)), torch.empty(0, shape.top_k, dtype=torch.int32))


class Sleeper(threading.Thread):
    """Rank 0, which has begun a dispatch and waits for the others'."""

    def __init__(self, exchange: ExpertExchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.lost: RankLost | None = None
        self.switches = 0  # that this wait took, each because the rank slept
        self.slept = 0.0  # as many without those at the end of a slice

    def run(self) -> None:
        begin(self.exchange)
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        try:
            self.exchange.finish_dispatch()
        except RankLost as lost:
            self.lost = lost
        slices = (time.monotonic() - began) / SLICE
        self.switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        self.slept = self.switches - slices

    def falls_asleep(self) -> None:
        """Wait until it sleeps, in a call of the kernel, or has ended."""
        stat = Path(f"/proc/self/task/{self.native_id}/stat")
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends as it is looked at
            while self.is_alive() and stat.read_text().rpartition(")")[2].split()[0] != "S":
                time.sleep(0)


def test_the_last_to_tell_wakes(group: Group) -> None:
    sleeper = Sleeper(group.exchanges[0])
    sleeper.start()
    for exchange in group.exchanges[1:]:
        sleeper.falls_asleep()
        begin(exchange)
    sleeper.join()
    assert sleeper.lost is None
    assert sleeper.slept <= 1 + BESIDE


@pytest.mark.parametrize("leaver", [1, RANKS - 1])
def test_one_that_leaves_is_noticed_whomever_a_rank_waits_for_first(group: Group, leaver: int) -> None:
    sleeper = Sleeper(group.exchanges[0])
    sleeper.start()
    sleeper.falls_asleep()
    group.exchanges[leaver].close()
    sleeper.join()
    assert sleeper.lost is not None
    assert (sleeper.lost.rank, sleeper.lost.reason) == (leaver, "it has left the group")


def test_one_that_has_told_may_leave(group: Group) -> None:
    sleeper = Sleeper(group.exchanges[0])
    sleeper.start()
    for exchange in group.exchanges[1:]:
        begin(exchange)
        sleeper.falls_asleep()
        exchange.close()
    sleeper.join()
    assert sleeper.lost is None


@pytest.mark.parametrize(("spin", "sleeps"), [(30.0, False), (0.0, True)])
def test_a_rank_waits_awake_while_it_is_to(spin: float, sleeps: bool) -> None:
    store, shape = HashStore(), replace(SHAPE, ranks=2)
    with ThreadPoolExecutor(2) as threads:
        join = [threads.submit(SharedMemoryExchange.join, shape, rank, store, spin=spin) for rank in range(2)]
        waiting, telling = (one.result() for one in join)
    sleeper = Sleeper(waiting)
    sleeper.start()
    time.sleep(20 * SLICE)
    begin(telling)
    sleeper.join()
    assert sleeper.lost is None
    assert (sleeper.switches > BESIDE) == sleeps
    for exchange in (waiting, telling):
        exchange.close()
