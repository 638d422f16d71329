"""Steps of processes that do nothing but compute and meet: how long a machine makes single steps by itself.

Run `python -m scripts.spinning_steps --milliseconds 9` beside a measurement of served ranks, for what their longest
step is to be compared with; `--megabytes 800` for ranks that read so much of weights in a step. Each process is bound
to a core of its own, does the same work in every phase of a step (hashes what lies in the caches, or adds up numbers
that lie in memory), allocates nothing, and waits awake for the others after each phase.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, MutableSequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray

import numpy as np

from bench.free_pages import all_reported, reports, told_since
from bench.progress import say

PHASES = 9  # as a step of a model of four MoE layers: before and after each exchange
BLOCK = bytes(16 * 1024)  # is hashed again and again, in the caches
APART = 8  # numbers between those of two processes: a cache line


def hashed(times: int) -> None:
    for _ in range(times):
        hashlib.sha256(BLOCK).digest()


def seconds_of_a_hash() -> float:
    """The least of many."""
    least = float("inf")
    for _ in range(200):
        began = time.perf_counter()
        hashed(1)
        least = min(least, time.perf_counter() - began)
    return least


def meet(told: MutableSequence[int], rank: int, number: int) -> None:
    """Wait awake until every process has come as far."""
    told[rank * APART] = number
    while min(told[:-1:APART]) < number:
        pass


def phases(hashes: int, megabytes: float) -> list[Callable[[], object]]:
    """What is done in each phase of a step."""
    if not megabytes:
        return [lambda: hashed(hashes)] * PHASES
    parts = np.array_split(np.ones(round(megabytes * 1e6 / 8), np.uint64), PHASES)
    return [part.sum for part in parts]


def steps(
    told: MutableSequence[int], rank: int, core: int, hashes: int, megabytes: float, seconds: float
) -> list[float]:
    """Seconds of each step until `seconds` are over on process 0, which says so in the last number of `told`."""
    os.sched_setaffinity(0, {core})
    found, number, work = list[float](), 1, phases(hashes, megabytes)
    meet(told, rank, number)  # everybody is there
    began = time.perf_counter()
    until = began + seconds
    while not told[-1]:
        for phase in range(PHASES):
            work[phase]()
            number += 1
            if rank == 0 and phase == PHASES - 1 and time.perf_counter() > until:
                told[-1] = 1  # before it says that it has come so far
            meet(told, rank, number)
        ended = time.perf_counter()
        found.append(ended - began)
        began = ended
    return found


def run(connection: Connection, *arguments: object) -> None:
    connection.send(steps(*arguments))  # type: ignore[arg-type]


def spinning(processes: int, milliseconds: float, megabytes: float, seconds: float) -> list[list[float]]:
    """Seconds of each step, by each process."""
    hashes = max(1, round(milliseconds / 1e3 / PHASES / seconds_of_a_hash()))
    told, cores = RawArray("Q", processes * APART + 1), sorted(os.sched_getaffinity(0))
    context, running = multiprocessing.get_context("spawn"), []
    for rank in range(processes):
        ours, theirs = context.Pipe()
        arguments = (theirs, told, rank, cores[rank % len(cores)], hashes, megabytes, seconds)
        process = context.Process(target=run, args=arguments, daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    found = []
    for process, ours in running:
        found.append(ours.recv())
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--milliseconds", type=float, default=9.0, help="of a step that nothing holds up")
    parser.add_argument(
        "--megabytes",
        type=float,
        default=0.0,
        help="of memory that each process reads in a step, in place of --milliseconds",
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    asyncio.run(all_reported(say))
    before = reports()
    took, *_ = spinning(args.processes, args.milliseconds, args.megabytes, args.seconds)
    median, tail = statistics.median(took), statistics.quantiles(took, n=100, method="inclusive")[98]
    told = f"median {1e3 * median:.1f} ms, p99 {1e3 * tail:.1f}, longest {1e3 * max(took):.1f}"
    beyond = f"{max(took) / median:.2f} times the median; {sum(one > 2 * median for one in took)} took more than twice"
    print(f"{len(took)} steps of {args.processes} processes: {told}, {beyond}")
    print("the longest five: " + ", ".join(f"{1e3 * one:.1f}" for one in sorted(took)[-5:]))
    print(told_since(before))


if __name__ == "__main__":
    main()
