"""A rank that dies or hangs is noticed by all others within a bounded time, by name, and leaves nothing open."""

from __future__ import annotations

import os
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from serving.expert_parallel.all_to_all import AllToAllExchange
from serving.expert_parallel.exchange import RankLost, Rows
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from tests.fakes.awake import retaken
from tests.fakes.stopping import harm
from tests.serving.expert_parallel.losing import RUNNING, exchange_and_end, exchange_until_lost, shape_of
from tests.serving.expert_parallel.ranks import Ranks

NOTICED = 0.05  # seconds after a kill
FEW, MANY = 4, int(os.environ.get("MILLRACE_LOSSES", "10"))  # MILLRACE_LOSSES=100 takes three minutes
SITTINGS = 3  # a machine that is busy with other things may be late in all trials of one
TRIALS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


def lose(kind: str, how: signal.Signals, trials: int, *, deadline: float, ranks: int = 3) -> list[float]:
    """How long after the signal the survivors noticed, the slowest of each trial; each named the right rank."""
    took, opened = [], {}
    numbers = tuple(range(trials))
    with Ranks() as group:
        victim = ranks - 1  # the last one is waited for last
        survivors = [
            group.start(rank, exchange_until_lost, kind, ranks, deadline, numbers) for rank in range(ranks - 1)
        ]
        for trial in numbers:
            lost = group.start(victim, exchange_until_lost, kind, ranks, deadline, (trial,))
            assert [rank.answer() for rank in (*survivors, lost)] == [RUNNING] * ranks
            began = time.monotonic()
            harm(lost.pid, how)
            seen = [rank.answer() for rank in survivors]
            assert [rank for rank, _, _ in seen] == [victim] * len(survivors), seen
            took.append(max(when for _, _, when in seen) - began)
            lost.close()
            for rank in survivors:
                descriptors = rank.answer()
                assert opened.setdefault(rank.rank, descriptors) == descriptors or trial == 0
    print(f"{kind}, {how.name}, {trials} times: median {sorted(took)[trials // 2]:.4f} s, most {max(took):.4f} s")
    return took


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", ["shared_memory", "all_to_all"])
@retaken
def test_a_killed_rank_is_noticed_at_once(kind: str, trials: int) -> None:
    for _ in range(SITTINGS):
        took = sorted(lose(kind, signal.SIGKILL, trials, deadline=20.0))
        if took[len(took) // 2] < NOTICED:
            break
    assert took[len(took) // 2] < NOTICED
    assert took[-1] < 10 * NOTICED  # what a busy machine may add


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", ["shared_memory", "all_to_all"])
@retaken
def test_a_stopped_rank_is_noticed_at_the_deadline(kind: str, trials: int) -> None:
    deadline = 0.5
    took = sorted(lose(kind, signal.SIGSTOP, trials, deadline=deadline))
    assert 0.9 * deadline < took[0]
    assert took[len(took) // 2] < 1.1 * deadline


@pytest.mark.parametrize("kind", ["shared_memory", "all_to_all"])
def test_a_rank_is_noticed_before_its_memory_is_freed(kind: str) -> None:
    """Which takes the kernel longer than anything else here; only then are its sockets and its pidfd told."""
    deadline = 600.0
    with Ranks() as group:
        survivor = group.start(0, exchange_until_lost, kind, 2, deadline, (0,))
        ending = group.start(1, exchange_and_end, kind, 2, deadline)
        assert ending.answer() == RUNNING
        assert [survivor.answer() for _ in range(2)][1][:2] == (1, "its process has ended")
        assert not select.select([os.pidfd_open(ending.pid)], [], [], 0)[0]


class NeverEnding:
    """A process group whose operations wait for a rank that does not answer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> Work:
        return cast(Work, self)

    def wait(self, moment: timedelta) -> None:
        time.sleep(moment.total_seconds())
        raise RuntimeError("the time is up")


@pytest.mark.parametrize("apart", [0.3, 1.2])  # of the deadline
@retaken
def test_ranks_that_begin_apart_name_the_one_that_has_stopped(apart: float) -> None:
    store = torch.distributed.HashStore()
    deadline = 0.5

    def lost(rank: int) -> int | None:
        time.sleep(apart * deadline * rank)
        watch = ProcessWatch({})
        exchange = AllToAllExchange(shape_of(3), NeverEnding(rank), store, watch, deadline)
        with pytest.raises(RankLost) as lost, closing(exchange):
            exchange.dispatch(Rows(torch.randn(1, 64)), torch.zeros(1, 2, dtype=torch.int64))
        return lost.value.rank

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lost, range(2))) == [2, 2]


def test_a_rank_that_does_not_come_is_named() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(RankLost, match="not come") as lost:
        SharedMemoryExchange.join(shape_of(2), 0, store, meeting=0.2)
    assert lost.value.rank == 1


def test_a_process_that_has_ended_before_is_noticed_too() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    watch = ProcessWatch({3: pid, 1: os.getpid()})
    assert watch.ended() == 3
    watch.close()
