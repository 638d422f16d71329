"""One rank of `bench.expert_exchange`: a process that exchanges rows and measures how long that takes.

Experts compute nothing: results are zeros that lie ready, in the exchange's own memory where it has some.
"""

from __future__ import annotations

import ctypes
import json
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from serving.expert_parallel.all_to_all import AllToAllExchange, connected
from serving.expert_parallel.exchange import ExchangeShape, ExchangeTraffic, ExpertExchange, Rows
from serving.expert_parallel.meeting import exchanged
from serving.expert_parallel.shared_memory import SharedMemoryExchange

EXPERTS, TOP_K = 256, 8  # as DeepSeek-V3
WARM_UP = 20  # rounds
DEADLINE = 120.0
DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class Case:
    ranks: int
    tokens: int  # of each rank
    hidden: int
    wire: str
    back: str
    rounds: int
    turns: int = 1

    @property
    def shape(self) -> ExchangeShape:
        return ExchangeShape(
            ranks=self.ranks,
            slots=EXPERTS // self.ranks,
            top_k=TOP_K,
            hidden=self.hidden,
            max_tokens=self.tokens,
            wire=DTYPES[self.wire],
            back=DTYPES[self.back],
        )


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: list[float]  # of each round
    dispatch_seconds: list[float]  # the part of it before the results are sent
    cpu_seconds: float  # of the process, in the mean of all rounds
    traffic: ExchangeTraffic  # of one round


@dataclass(frozen=True, slots=True)
class Allocated:
    """What the rounds of one rank have left allocated, or have ever had beyond that."""

    python: int  # bytes more than before, by tracemalloc
    heap: int  # bytes more than before, by mallinfo2
    torch: int  # bytes that torch's allocator gave out


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Bytes of the C heap in use, memory mapped for large blocks included."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    return int(told.uordblks + told.hblkhd)


def rounds_of(exchange: ExpertExchange, tokens: int) -> Iterator[tuple[float, float]]:
    """Seconds of the dispatch and of the whole round, again and again."""
    shape = exchange.shape
    generator = torch.Generator().manual_seed(exchange.rank)
    rows = Rows(torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16))
    scores = torch.rand(tokens, shape.ranks * shape.slots, generator=generator)
    physical = scores.topk(shape.top_k).indices.int()
    weights = scores.topk(shape.top_k).values
    results = torch.zeros(shape.most_received, shape.hidden, dtype=shape.back)
    while True:
        began = time.perf_counter()
        received = exchange.dispatch(rows, physical)
        for _ in received.portions:
            pass
        between = time.perf_counter()
        ready = received.results if received.results is not None else results[: int(received.counts.sum())]
        exchange.combine(ready, weights)
        yield between - began, time.perf_counter() - began


class Rounds:
    """Of one exchange, timed in turns."""

    def __init__(self, exchange: ExpertExchange, case: Case) -> None:
        self._exchange, self._rounds = exchange, rounds_of(exchange, case.tokens)
        for _ in range(WARM_UP):
            next(self._rounds)
        self._before = exchange.traffic
        self._took: list[tuple[float, float]] = []
        self._cpu = 0.0

    def turn(self, rounds: int) -> None:
        began = time.process_time()
        self._took += (next(self._rounds) for _ in range(rounds))
        self._cpu += time.process_time() - began

    @property
    def measured(self) -> Measured:
        sent, rounds = self._exchange.traffic - self._before, len(self._took)
        each = {name: getattr(sent, name) // rounds for name in ExchangeTraffic.__dataclass_fields__}
        whole, dispatched = [whole for _, whole in self._took], [first for first, _ in self._took]
        return Measured(whole, dispatched, self._cpu / rounds, ExchangeTraffic(**each))


def allocated(exchange: ExpertExchange, case: Case) -> Allocated:
    """Of as many rounds as are timed, and of a quarter of them under torch's profiler."""
    rounds = rounds_of(exchange, case.tokens)
    for _ in range(WARM_UP):
        next(rounds)
    heap = heap_bytes()
    for _ in range(case.rounds):
        next(rounds)
    heap = heap_bytes() - heap
    tracemalloc.start()
    for _ in range(WARM_UP):
        next(rounds)
    python = tracemalloc.get_traced_memory()[0]
    for _ in range(case.rounds):
        next(rounds)
    python = tracemalloc.get_traced_memory()[0] - python
    tracemalloc.stop()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(case.rounds // 4):
            next(rounds)
    given = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events() or ())
    return Allocated(python, heap, given)


class BareGloo:
    """Two all-to-all operations a round that carry what a rank sends in the mean, evenly; timed in turns."""

    def __init__(self, store: Store, rank: int, case: Case, sent: ExchangeTraffic) -> None:
        words = exchanged(store, "sent", rank, case.ranks, json.dumps(asdict(sent)).encode(), DEADLINE)
        everyone = [ExchangeTraffic(**json.loads(word)) for word in words]
        pairs = case.ranks * (case.ranks - 1)
        parts = (
            sum(one.dispatch_bytes + one.routing_bytes for one in everyone) // pairs,
            sum(one.combine_bytes for one in everyone) // pairs,
        )
        self._group = connected(store, rank, case.ranks, DEADLINE)
        self._outgoing = [torch.zeros(case.ranks * part, dtype=torch.uint8) for part in parts]
        self._incoming = [torch.zeros(case.ranks * part, dtype=torch.uint8) for part in parts]
        self.seconds: list[float] = []
        self._cpu = 0.0
        self.turn(WARM_UP)
        self.seconds.clear()
        self._cpu = 0.0

    @property
    def cpu_seconds(self) -> float:
        """Of the process, gloo's own threads among it, in the mean of all rounds."""
        return self._cpu / len(self.seconds)

    def turn(self, rounds: int) -> None:
        began = time.process_time()
        self._exchange(rounds)
        self._cpu += time.process_time() - began

    def _exchange(self, rounds: int) -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            for leaving, arrived in zip(self._outgoing, self._incoming, strict=True):
                self._group.alltoall_base(arrived, leaving, [], []).wait()
            self.seconds.append(time.perf_counter() - began)


def run_rank(rank: int, port: int, case: Case, answers: Connection) -> None:
    """What is compared takes turns, so that what else the host does hits all alike."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    shared = SharedMemoryExchange.join(case.shape, rank, PrefixStore("shared", store), deadline=DEADLINE)
    over = AllToAllExchange.join(case.shape, rank, PrefixStore("over", store), deadline=DEADLINE)
    timed, timed_over = Rounds(shared, case), Rounds(over, case)
    timed.turn(1)
    gloo = BareGloo(PrefixStore("gloo", store), rank, case, timed.measured.traffic)
    for _ in range(case.turns):
        timed.turn(case.rounds // case.turns)
        gloo.turn(case.rounds // case.turns)
    timed_over.turn(max(1, case.rounds // case.turns))
    found: dict[str, Any] = {"shared": timed.measured, "gloo": gloo.seconds, "over": timed_over.measured}
    found["gloo cpu"] = gloo.cpu_seconds
    found["allocated"] = allocated(shared, case)
    shared.close()
    over.close()
    answers.send(found)
