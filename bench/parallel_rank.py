"""One rank of `bench.parallel`: a process that holds its share of a model and times steps when it is told to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from serving.batch.ragged import RaggedBatch
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout

BLOCK_SIZE = 16
DEADLINE = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelCase:
    """A layout, and what its ranks compute: one prompt, then decode steps of some sequences of `context` tokens."""

    layout: ParallelLayout
    threads: int  # of each rank
    path: Path
    prompt: int
    batch: int
    context: int
    steps: int


@dataclass(frozen=True, slots=True)
class ParallelTime:
    """What something has taken of one rank."""

    seconds: float
    cpu: float  # seconds of its process, all threads: other load changes these little
    waits: float  # seconds spent waiting for other ranks
    sent: float  # bytes to them

    def __sub__(self, other: ParallelTime) -> ParallelTime:
        return ParallelTime(
            self.seconds - other.seconds, self.cpu - other.cpu, self.waits - other.waits, self.sent - other.sent
        )

    def over(self, count: int) -> ParallelTime:
        return ParallelTime(self.seconds / count, self.cpu / count, self.waits / count, self.sent / count)


@dataclass(frozen=True, slots=True)
class ParallelTimes:
    """Of one round of one rank."""

    prefill: ParallelTime
    decode: ParallelTime  # of one step
    tokens: tuple[int, ...]  # of the prompt's last row and of each decode step's first


class BenchRank:
    """The rank's share, connected, with KV for all sequences."""

    def __init__(self, case: ParallelCase, rank: int, store: TCPStore) -> None:
        loaded = load(case.path, "float32", layout=partial(hold_share, layout=case.layout, rank=rank))
        self.bytes_read = loaded.bytes_read
        self.ranks = ParallelRank.join(case.layout, rank, store, deadline=DEADLINE)
        self.case, self.model = case, apply_parallel(loaded.model, self.ranks)
        each = -(-(case.context + case.steps) // BLOCK_SIZE)
        of_prompt = -(-case.prompt // BLOCK_SIZE)
        blocks = of_prompt + case.batch * each
        self.whole = list(range(of_prompt))
        self.tables = [list(range(of_prompt + one * each, of_prompt + (one + 1) * each)) for one in range(case.batch)]
        self.planes = [
            tuple(torch.zeros(blocks, BLOCK_SIZE, *plane.shape) for plane in layer.planes)
            for layer in self.model.spec.kv_layers("float32")
        ]
        self._step([_drawn(self.model, one, case.context) for one in range(case.batch)], [0] * case.batch, self.tables)

    def _so_far(self) -> ParallelTime:
        return ParallelTime(
            time.perf_counter(), time.process_time(), self.ranks.waits.seconds, float(self.ranks.bytes_sent)
        )

    def round(self) -> ParallelTimes:
        case, began = self.case, self._so_far()
        chosen = [int(self._step([_drawn(self.model, 0, case.prompt)], [0], [self.whole])[0])]
        between, latest = self._so_far(), torch.zeros(case.batch, dtype=torch.int64)
        for step in range(case.steps):
            starts = [case.context + step] * case.batch
            latest = self._step([[token] for token in latest.tolist()], starts, self.tables)
            chosen.append(int(latest[0]))
        decode = (self._so_far() - between).over(case.steps)
        return ParallelTimes(between - began, decode, tuple(chosen))

    def _step(self, tokens: list[list[int]], starts: list[int], tables: list[list[int]]) -> Tensor:
        batch = RaggedBatch.build(tokens=tokens, starts=starts, block_tables=tables, block_size=BLOCK_SIZE)
        with torch.inference_mode():
            return self.model.logits(self.model(batch, self.planes)[batch.logits_rows]).argmax(-1)


def _drawn(model: Decoder, seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.spec.vocab_size, (count,), generator=generator).tolist()


def run_parallel_rank(rank: int, port: int, case: ParallelCase, pipe: Connection) -> None:
    """Says how many bytes it has read, then times a round whenever it is sent True, and ends with False."""
    torch.set_num_threads(case.threads)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE))
    held = BenchRank(case, rank, store)
    pipe.send(held.bytes_read)
    while pipe.recv():
        pipe.send(held.round())
    held.ranks.close()
