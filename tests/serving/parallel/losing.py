"""Ranks of a layout that exchange until one of them is lost, and say whom they miss."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
from torch.distributed import Store

from serving.expert_parallel.exchange import RankLost
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout

RUNNING = "running"


def step_until_lost(
    rank: int, store: Store, answers: Connection, layout: ParallelLayout, deadline: float
) -> tuple[int | None, str, float]:
    """RUNNING, then the lost rank, the reason and the clock's time."""
    ranks = ParallelRank.join(layout, rank, store, deadline=deadline)
    x = torch.ones(4, 8)
    try:
        for step in range(1_000_000):
            if ranks.previous is not None:
                x = ranks.previous.receive(torch.empty(4, 8), sender=0)
            assert ranks.tensor is not None and ranks.pipeline is not None
            ranks.tensor.sum(x)
            if ranks.following is not None:
                ranks.following.send(x, to=1)
            ranks.pipeline.shared(x, layout.pipeline - 1)
            if step == 3:
                answers.send(RUNNING)
    except RankLost as lost:
        return lost.rank, lost.reason, time.monotonic()
    finally:
        ranks.close()
    raise AssertionError("nobody was lost")
