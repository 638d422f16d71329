"""Ranks that exchange rows until one of them is lost, and say when they noticed."""

from __future__ import annotations

import gc
import threading
import time
from multiprocessing.connection import Connection

import torch
from torch.distributed import PrefixStore, Store

from serving.expert_parallel.all_to_all import GROUP_END
from serving.expert_parallel.exchange import ExchangeShape, RankLost, Rows
from tests.serving.expert_parallel.groups import join, made_of, random_experts, weights_of
from tests.serving.expert_parallel.ranks import left_open
from tests.serving.half_ended import end_main_thread

RUNNING = "running"
EXCHANGES = 3  # before a rank tells that it runs


def shape_of(ranks: int) -> ExchangeShape:
    return ExchangeShape(ranks=ranks, slots=2, top_k=2, hidden=64, max_tokens=8, wire=torch.float32, back=torch.float32)


def exchange_until_lost(
    rank: int, store: Store, answers: Connection, kind: str, ranks: int, deadline: float, trials: tuple[int, ...]
) -> None:
    """For each trial: RUNNING, then the lost rank, the reason and the clock's time, then what is open."""
    generator = torch.Generator().manual_seed(rank)
    shape = shape_of(ranks)
    for trial in trials:
        exchange = join(kind, shape, rank, PrefixStore(f"trial{trial}", store), deadline)
        rows = torch.randn(4, shape.hidden, generator=generator)
        physical = random_experts(4, shape.top_k, ranks * shape.slots, generator)
        try:
            for step in range(1_000_000):
                exchange.combine(made_of(exchange.dispatch(Rows(rows), physical), 0), weights_of(physical))
                if step == EXCHANGES:
                    answers.send(RUNNING)
        except RankLost as lost:
            seen = (lost.rank, lost.reason, time.monotonic())
        answers.send(seen)
        exchange.close()
        del exchange
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == GROUP_END:
                thread.join()
        answers.send(left_open())


def exchange_and_end(rank: int, store: Store, answers: Connection, kind: str, ranks: int, deadline: float) -> None:
    """Exchanges until the others have told that they run; then the process is ending for as long as it is let."""
    shape = shape_of(ranks)
    exchange = join(kind, shape, rank, PrefixStore("trial0", store), deadline)
    physical = random_experts(4, shape.top_k, ranks * shape.slots, torch.Generator().manual_seed(rank))
    for _ in range(EXCHANGES + 2):  # the last needs rows that others send when they have told
        received = exchange.dispatch(Rows(torch.randn(4, shape.hidden)), physical)
        exchange.combine(made_of(received, 0), weights_of(physical))
    answers.send(RUNNING)
    end_main_thread()
