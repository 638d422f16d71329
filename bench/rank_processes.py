"""Runs one function in a process for each rank of a group that meet at a store, and gathers what they answer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from torch._C._distributed_c10d import TCPStore


def run_ranks(ranks: int, run: Callable[..., None], *given: Any, preload: bool = True) -> list[Any]:
    """What `run(rank, port, *given, answers)` sends on `answers`, a connection, in each of so many processes, by rank.

    `port` is that of a TCPStore of this process. With `preload`, one process imports the function's module and the
    ranks are forked from it; without, each imports it anew. Raises EOFError where a rank ends without an answer: the
    others, which may wait for it, are ended as well.
    """
    context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload([run.__module__])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=run, args=(rank, store.port, *given, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        return _gathered([ours for ours, _ in pipes])
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()


def _gathered(pipes: Sequence[Connection]) -> list[Any]:
    """One answer from each, in their order, whichever is there first. Raises EOFError."""
    answers: dict[int, Any] = {}
    waiting = {pipe: number for number, pipe in enumerate(pipes)}
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            answers[waiting.pop(pipe)] = pipe.recv()
    return [answers[number] for number in range(len(pipes))]
