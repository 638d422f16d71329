"""Stages follow each other: the first computes a prompt's next chunk while the second has yet to take the last."""

from __future__ import annotations

from pathlib import Path

from serving.loader.loading import load
from serving.parallel.layout import ParallelLayout
from tests.serving.expert_parallel.served import greedy
from tests.serving.parallel.groups import Threads
from tests.serving.parallel.models import written
from tests.serving.parallel.workers import ParallelWorker

PROMPT = [3, 17, 5, 60, 22, 41, 9, 77, 13, 2, 58]
FIRST = 6


def test_a_chunk_without_logits_waits_for_no_other_stage(tmp_path: Path) -> None:
    path = written(tmp_path, ["llama3"])["llama3"]
    with Threads(ParallelLayout(pipeline=2)) as threads:
        worker = ParallelWorker(path, threads.layout, threads, [4, 1, 5, 0], "float32")
        worker.step_of(0, PROMPT[:FIRST], 0, logits=False)  # the second stage does nothing yet

        def rest(rank: int) -> int | None:
            if rank == 1:
                worker.step_of(1, PROMPT[:FIRST], 0, logits=False)
            return worker.step_of(rank, PROMPT[FIRST:], FIRST)

        tokens = threads.each(rest)
    ((wanted, _),) = greedy(load(path, "float32").model, [PROMPT])
    assert tokens == wanted[:1] * 2
