"""Ranks as real processes that meet in a store of this one, and what they are made to do.

They are forked from a server that has imported torch once, so that a group starts within a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import TCPStore

START_SECONDS = 120.0
_FORKING = multiprocessing.get_context("forkserver")
_JOBS = ("served", "groups", "recovering")
_FORKING.set_forkserver_preload([f"tests.serving.expert_parallel.{name}" for name in _JOBS])

Job = Callable[..., Any]


def _run(job: Job, rank: int, port: int, answers: Connection, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    answers.send(job(rank, store, answers, *arguments))


class Rank:
    """A process that runs `job(rank, store, answers, *arguments)`; what it sends and returns arrives here."""

    def __init__(self, rank: int, port: int, job: Job, arguments: tuple[Any, ...]) -> None:
        self.rank = rank
        self._pipe, theirs = _FORKING.Pipe()
        self._process = _FORKING.Process(target=_run, args=(job, rank, port, theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def answer(self, seconds: float = START_SECONDS) -> Any:
        """Its next word. Raises EOFError if it has left, AssertionError if it is late."""
        assert self._pipe.poll(seconds), f"rank {self.rank} says nothing"
        return self._pipe.recv()

    def ask(self, seconds: float = START_SECONDS) -> Any:
        """Its next word after it has been asked for one."""
        self._pipe.send(None)
        return self.answer(seconds)

    def close(self) -> None:
        if self._pipe.closed:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


class Ranks:
    """Ranks that are started one by one and ended together, and the store that they meet in."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port  # of the store that ranks meet in
        self._started: list[Rank] = []

    def start(self, rank: int, job: Job, *arguments: Any) -> Rank:
        self._started.append(Rank(rank, self.port, job, arguments))
        return self._started[-1]

    def start_all(self, ranks: int, job: Job, *arguments: Any) -> list[Rank]:
        return [self.start(rank, job, *arguments) for rank in range(ranks)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._started:
            rank.close()


def keep_store(_: int, store: TCPStore, answers: Connection) -> None:
    """A store in a process of its own: its port, and then nothing but that."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers.send(kept.port)
    answers.recv()


def left_open() -> list[str]:
    """What this process has open, its Python threads, and the shared memory that it maps."""
    threads = [f"thread {thread.name}" for thread in threading.enumerate()]
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line]
    return sorted([*open_descriptors(), *threads, *(f"maps {name}" for name in maps)])


def open_descriptors() -> list[str]:
    """What this process has open, but for the list itself."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
        except FileNotFoundError:
            continue
    return sorted(found)
