"""Greedy decoding of tiny models by the ranks of a layout, each a process that holds its share alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.joining import ParallelRank
from serving.parallel.layout import ParallelLayout
from tests.serving.expert_parallel.served import greedy

DEADLINE = 120.0

Case = tuple[Path, ParallelLayout]
Answer = list[tuple[list[int], Any]]


def joined(path: Path, layout: ParallelLayout, rank: int, store: Store) -> tuple[Decoder, ParallelRank]:
    """The rank's share of the model at `path`, float32, connected to the others'."""
    model = load(path, "float32", layout=partial(hold_share, layout=layout, rank=rank)).model
    ranks = ParallelRank.join(layout, rank, store, deadline=DEADLINE)
    return apply_parallel(model, ranks), ranks


@torch.inference_mode()
def serve_cases(
    rank: int, store: Store, _: Connection, cases: Sequence[Case], prompts: Sequence[list[int]]
) -> list[Answer]:
    """For each case the tokens and logits that this rank comes to."""
    found = []
    for number, (path, layout) in enumerate(cases):
        model, ranks = joined(path, layout, rank, PrefixStore(f"case{number}", store))
        found.append([(tokens, logits.numpy()) for tokens, logits in greedy(model, prompts)])
        ranks.close()
    return found
