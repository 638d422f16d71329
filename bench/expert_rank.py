"""One rank of `bench.expert_exchange`: a process that exchanges rows and measures how long that takes.

Experts compute nothing: results are zeros that lie ready, in the exchange's own memory where it has some. With experts
of a width, INT8 ones of random weights compute, over rows where they lie and, in turns, over rows that are gathered.
"""

from __future__ import annotations

import ctypes
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from serving.expert_parallel.all_to_all import AllToAllExchange, connected
from serving.expert_parallel.exchange import ExchangeShape, ExchangeTraffic, ExpertExchange, Received, Rows
from serving.expert_parallel.meeting import exchanged
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.kernels import cpu, silu_mul
from serving.kernels.cpu.grouped import GroupedLinear, PlacedRows

EXPERTS, TOP_K = 256, 8  # as DeepSeek-V3
WARM_UP = 20  # rounds
DEADLINE = 120.0
DTYPES = {"int8": torch.int8, "bf16": torch.bfloat16, "f32": torch.float32}

Compute = Callable[[Received], Tensor]
"""What becomes of rows received: the results."""


@dataclass(frozen=True, slots=True)
class Case:
    ranks: int
    tokens: int  # of each rank
    hidden: int
    wire: str
    back: str
    rounds: int
    turns: int = 1
    width: int = 0  # of the experts that compute; 0: none does

    @property
    def in_place(self) -> bool:
        """Whether rows are of a type that experts compute with where they lie."""
        return self.wire == "int8"

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


class NoExperts:
    """Zeros in the results' own memory, once the rows can be computed with: in place, or gathered first."""

    def __init__(self, shape: ExchangeShape, *, gathered: bool) -> None:
        self._gathered = gathered
        self._results = torch.zeros(shape.most_received, shape.hidden, dtype=shape.back)

    def __call__(self, received: Received) -> Tensor:
        if self._gathered:
            for _ in received.portions:
                pass
        else:
            received.in_place()
        return received.results if received.results is not None else self._results[: int(received.counts.sum())]


class Int8Experts:
    """Of random weights, by the compiled kernel of one thread."""

    def __init__(self, shape: ExchangeShape, width: int) -> None:
        kernels = cpu.load(threads=1)
        assert kernels is not None, "there is no compiler"
        self._kernels = kernels
        self._gate_up = self._random(shape.slots, 2 * width, shape.hidden)
        self._down = self._random(shape.slots, shape.hidden, width)

    @staticmethod
    def _random(slots: int, outputs: int, inputs: int) -> GroupedLinear:
        weights = [torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8) for _ in range(slots)]
        scales = [torch.full((outputs,), 1 / (127 * inputs**0.5)) for _ in range(slots)]
        return GroupedLinear(weights, scales, [None] * slots)

    def in_place(self, received: Received) -> Tensor:
        rows = received.in_place()
        inner = self._inner(received, len(rows.addresses))
        self._gate_up(self._kernels, rows, received.counts, inner)
        return self._finished(received, inner)

    def gathered(self, received: Received) -> Tensor:
        """Portion by portion, each computed with while it is in the caches."""
        inner, end = self._inner(received, int(received.counts.sum())), 0
        for portion in received.portions:
            rows, begin = portion.rows, end
            end += len(rows.values)
            assert rows.scale is not None
            counts = torch.zeros_like(received.counts)
            own = slice(portion.slots.start, portion.slots.stop)
            counts[own] = received.counts[own]
            self._gate_up(self._kernels, PlacedRows.of(rows.values, rows.scale), counts, inner[begin:end])
        return self._finished(received, inner)

    def _inner(self, received: Received, count: int) -> Tensor:
        assert received.results is not None
        return torch.empty(count, self._gate_up.outputs, dtype=received.results.dtype)

    def _finished(self, received: Received, inner: Tensor) -> Tensor:
        assert received.results is not None
        return self._down(self._kernels, silu_mul(inner), received.counts, received.results)


def rounds_of(exchange: ExpertExchange, tokens: int, compute: Compute) -> Iterator[tuple[float, float]]:
    """Seconds of the dispatch, with what it takes to compute, and of the whole round, again and again."""
    shape = exchange.shape
    generator = torch.Generator().manual_seed(exchange.rank)
    rows = Rows(torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16))
    scores = torch.rand(tokens, shape.ranks * shape.slots, generator=generator)
    physical = scores.topk(shape.top_k).indices.int()
    weights = scores.topk(shape.top_k).values
    while True:
        began = time.perf_counter()
        results = compute(exchange.dispatch(rows, physical))
        between = time.perf_counter()
        exchange.combine(results, weights)
        yield between - began, time.perf_counter() - began


class Rounds:
    """Of one exchange, timed in turns."""

    def __init__(self, exchange: ExpertExchange, case: Case, compute: Compute, warm_up: int = WARM_UP) -> None:
        self._rounds = rounds_of(exchange, case.tokens, compute)
        before = exchange.traffic
        for _ in range(warm_up):
            next(self._rounds)
        sent = exchange.traffic - before
        each = {name: getattr(sent, name) // warm_up for name in ExchangeTraffic.__dataclass_fields__}
        self.sent = ExchangeTraffic(**each)  # in a round
        self._took: list[tuple[float, float]] = []
        self._cpu = 0.0

    def turn(self, rounds: int) -> None:
        began = time.process_time()
        self._took += (next(self._rounds) for _ in range(rounds))
        self._cpu += time.process_time() - began

    @property
    def measured(self) -> Measured:
        whole, dispatched = [whole for _, whole in self._took], [first for first, _ in self._took]
        return Measured(whole, dispatched, self._cpu / len(self._took), self.sent)


def allocated(exchange: ExpertExchange, case: Case) -> Allocated:
    """Of as many rounds as are timed, and of a quarter of them under torch's profiler."""
    rounds = rounds_of(exchange, case.tokens, NoExperts(case.shape, gathered=not case.in_place))
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
    gathered = Rounds(shared, case, NoExperts(case.shape, gathered=True))
    timed = Rounds(shared, case, NoExperts(case.shape, gathered=False)) if case.in_place else gathered
    timed_over = Rounds(over, case, NoExperts(case.shape, gathered=True))
    gloo = BareGloo(PrefixStore("gloo", store), rank, case, timed.sent)
    for _ in range(case.turns):
        for one in {id(one): one for one in (timed, gloo, gathered)}.values():
            one.turn(case.rounds // case.turns)
    timed_over.turn(max(1, case.rounds // case.turns))
    found: dict[str, Any] = {"shared": timed.measured, "gathered": gathered.measured, "over": timed_over.measured}
    found |= {"gloo": gloo.seconds, "gloo cpu": gloo.cpu_seconds, "allocated": allocated(shared, case)}
    shared.close()
    over.close()
    answers.send(found)


def run_experts(rank: int, port: int, case: Case, answers: Connection) -> None:
    """Rounds in which INT8 experts compute: over rows in place, and over gathered ones, in turns."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    shared = SharedMemoryExchange.join(case.shape, rank, PrefixStore("shared", store), deadline=DEADLINE)
    experts = Int8Experts(case.shape, case.width)
    both = [Rounds(shared, case, compute, warm_up=2) for compute in (experts.in_place, experts.gathered)]
    for _ in range(case.turns):
        for one in both:
            one.turn(case.rounds // case.turns)
    shared.close()
    answers.send([one.measured for one in both])
