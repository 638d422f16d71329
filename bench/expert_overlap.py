"""What a step in two halves gains or loses against a whole one, by how long the wire between ranks takes.

Run `python -m bench.expert_overlap`. Ranks are processes of this host, and rows travel through shared memory; what
arrives is given out no sooner than a set time after the rank itself has sent. Whole and halved steps take turns.
`--trace FILE` writes a timeline of a few halved steps for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from bench.balance_rank import LiveCase, model_of
from bench.rank_processes import run_ranks
from serving.batch.ragged import RaggedBatch
from serving.engine.tracing import TraceWriter
from serving.expert_parallel.exchange import ExchangeTraffic, ExpertExchange, Received, RoundTrips, Rows
from serving.expert_parallel.layer import apply_expert_parallel, exchange_shape, hold_experts
from serving.expert_parallel.micro_batches import Note, overlap_pays, overlapped_step
from serving.expert_parallel.shared_memory import SharedMemoryExchange
from serving.model.decoder import Decoder
from serving.model.expert_balance import Layout, placed

DEADLINE = 120.0
WARM_UP = 5
RUNS = 3
TRACED = 3  # steps


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """A group's steps: `rows` sequences of one new token each on every rank."""

    ranks: int
    rows: int
    delays: tuple[float, ...]  # seconds, one way
    steps: int  # of each form, delay and run
    trace: Path | None


@dataclass(frozen=True, slots=True)
class OverlapMeasured:
    """Seconds of each step, run by run, and whether both forms had the same bits."""

    whole: list[list[float]]
    halved: list[list[float]]
    equal: bool


class DelayedExchange(RoundTrips):
    """An exchange (exchange.ExpertExchange) over a wire that takes `delay` seconds each way."""

    def __init__(self, inner: ExpertExchange) -> None:
        self.inner, self.delay = inner, 0.0
        self.shape, self.rank = inner.shape, inner.rank
        self._rows: deque[float] = deque()
        self._results: deque[float] = deque()
        self.begin_step()

    def begin_step(self) -> None:
        self.waited: list[tuple[str, float, float]] = []

    @property
    def traffic(self) -> ExchangeTraffic:
        return self.inner.traffic

    @property
    def agreed(self) -> int:
        return self.inner.agreed

    def announce(self, number: int) -> None:
        self.inner.announce(number)

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:  # noqa: N803
        self.inner.begin_dispatch(rows, physical_TK)
        self._rows.append(time.perf_counter() + self.delay)

    def finish_dispatch(self) -> Received:
        self._wait("rows travel", self._rows.popleft())
        return self.inner.finish_dispatch()

    def begin_combine(self, results_NH: Tensor) -> None:  # noqa: N803
        self.inner.begin_combine(results_NH)
        self._results.append(time.perf_counter() + self.delay)

    def finish_combine(self, weights_TK: Tensor) -> Tensor:  # noqa: N803
        self._wait("results travel", self._results.popleft())
        return self.inner.finish_combine(weights_TK)

    def _wait(self, what: str, until: float) -> None:
        """Asleep, so that other processes may have the core."""
        self.waited.append((what, until - self.delay, self.delay))
        if (left := until - time.perf_counter()) > 0:
            time.sleep(left)

    def close(self) -> None:
        self.inner.close()


def batch_of(rows: int, step: int, rank: int) -> RaggedBatch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(1000, (rows, 1), generator=generator).tolist()
    return RaggedBatch.build(
        tokens=tokens, starts=[0] * rows, block_tables=[[row] for row in range(rows)], block_size=4
    )


def measured(case: OverlapCase, rank: int, port: int) -> list[OverlapMeasured]:
    """For each delay."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    shape = replace(LiveCase(case.ranks, 0, moving=False), experts=16)
    model = model_of(shape)
    spread = [placed([1.0] * shape.experts, Layout(ranks=case.ranks, slots=shape.experts // case.ranks))] * shape.layers
    hold_experts(model, spread, rank)
    joined = SharedMemoryExchange.join(
        exchange_shape(model, spread[0], case.rows), rank, PrefixStore("rows", store), deadline=DEADLINE
    )
    exchange = DelayedExchange(joined)
    apply_expert_parallel(model, spread, exchange)
    layers = model.spec.kv_layers("float32")
    kv = [tuple(torch.zeros(case.rows, 4, *plane.shape) for plane in layer.planes) for layer in layers]
    found = []
    for delay in case.delays:
        exchange.delay = delay
        runs = OverlapMeasured([], [], equal=True)
        for _ in range(RUNS):
            whole, halved, equal = list[float](), list[float](), runs.equal
            for step in range(WARM_UP + case.steps):
                batch = batch_of(case.rows, step, rank)
                began = time.perf_counter()
                out = model(batch, kv)
                between = time.perf_counter()
                other = overlapped_step(model, batch, kv)
                ended = time.perf_counter()
                equal = equal and torch.equal(out, other)
                if step >= WARM_UP:
                    whole.append(between - began)
                    halved.append(ended - between)
            runs = OverlapMeasured([*runs.whole, whole], [*runs.halved, halved], equal)
        found.append(runs)
    if case.trace is not None:
        trace(case, exchange, model, kv)
    exchange.close()
    return found


def trace(case: OverlapCase, exchange: DelayedExchange, model: Decoder, kv: list[tuple[Tensor, ...]]) -> None:
    """A few halved steps of all ranks; rank 0 writes what its halves did, and what was on the wire meanwhile."""
    assert case.trace is not None
    writer = TraceWriter(case.trace, f"rank 0 of {case.ranks}") if exchange.rank == 0 else None
    for step in range(TRACED):
        exchange.begin_step()
        overlapped_step(model, batch_of(case.rows, step, exchange.rank), kv, noting(writer))
        if writer is not None:
            for number, (what, began, seconds) in enumerate(exchange.waited):
                writer.span(what, began, seconds, {"half": number % 2}, row=3 + number % 2)
    if writer is not None:
        writer.close()


def noting(writer: TraceWriter | None) -> Note | None:
    """Each half of a step gets a row."""
    if writer is None:
        return None
    return lambda what, half, began, seconds: writer.span(what, began, seconds, {"half": half}, row=1 + half)


def run_rank(rank: int, port: int, case: OverlapCase, answers: Connection) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        answers.send(measured(case, rank, port))


def run_case(case: OverlapCase) -> list[OverlapMeasured]:
    """What rank 0 has measured for each delay; bits are compared on all."""
    answers: list[list[OverlapMeasured]] = run_ranks(case.ranks, run_rank, case)
    return [replace(ranks[0], equal=all(one.equal for one in ranks)) for ranks in zip(*answers, strict=True)]


def table(case: OverlapCase) -> Iterator[Sequence[str]]:
    yield "ranks", "rows a rank", "delay ms", "whole ms", "halved ms", "gain in each run", "pays", "same bits"
    for delay, found in zip(case.delays, run_case(case), strict=True):
        whole, halved = ([statistics.median(run) for run in form] for form in (found.whole, found.halved))
        gains = ", ".join(f"{100 * (1 - half / full):+.0f} %" for full, half in zip(whole, halved, strict=True))
        yield (
            f"{case.ranks}",
            f"{case.rows}",
            f"{1e3 * delay:g}",
            f"{1e3 * statistics.median(whole):.1f}",
            f"{1e3 * statistics.median(halved):.1f}",
            gains,
            "yes" if overlap_pays(found.whole, found.halved) else "no",
            "yes" if found.equal else "NO",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256], help="of each rank in a step")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 2, 3, 5], help="milliseconds, one way")
    parser.add_argument("--steps", type=int, default=20, help="of each form, delay and run")
    parser.add_argument("--trace", type=Path, help="where the timeline of the last delay goes")
    args = parser.parse_args()
    print(f"load averages {', '.join(f'{one:.0f}' for one in os.getloadavg())}")
    for rows in args.rows:
        case = OverlapCase(args.ranks, rows, tuple(delay / 1e3 for delay in args.delays), args.steps, args.trace)
        for number, cells in enumerate(table(case)):
            print("| " + " | ".join(cells) + " |", flush=True)
            if number == 0 and rows == args.rows[0]:
                print("| " + " | ".join(["---"] * len(cells)) + " |")


if __name__ == "__main__":
    main()
