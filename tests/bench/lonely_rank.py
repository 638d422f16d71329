"""Ranks for tests of bench.rank_processes, in a module of their own: processes that begin with it begin at once."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection


def answering(rank: int, port: int, given: str, answers: Connection) -> None:
    answers.send((rank, given, port > 0))


def last_dies(rank: int, port: int, ranks: int, answers: Connection) -> None:
    """The last ends without a word; the others wait for it."""
    while rank < ranks - 1:
        signal.pause()
