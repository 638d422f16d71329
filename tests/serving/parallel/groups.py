"""Layouts whose ranks are threads of this process, connected by gloo as processes are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from torch.distributed import HashStore

from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout

Answer = TypeVar("Answer")


class Threads:
    """All ranks of a layout, each driven by a thread of its own."""

    def __init__(self, layout: ParallelLayout, deadline: float = 120.0) -> None:
        self._threads = ThreadPoolExecutor(layout.ranks)
        self.layout, store = layout, HashStore()
        self.ranks = self.each(lambda rank: ParallelRank.join(layout, rank, store, deadline=deadline))

    def each(self, act: Callable[[int], Answer]) -> list[Answer]:
        """What `act(rank)` gives, done by all ranks at once."""
        return [done.result() for done in [self._threads.submit(act, rank) for rank in range(self.layout.ranks)]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()
