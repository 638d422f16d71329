"""Drives a Decoder over a small paged pool whose unused memory is NaN and whose block tables are shuffled."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from serving.batch.ragged import OffloadedKV, RaggedBatch
from serving.model.decoder import Decoder


class PagedRun:
    """Several sequences of one decoder, advanced by any number of tokens at a time."""

    def __init__(
        self,
        model: Decoder,
        sequences: list[list[int]],
        *,
        block_size: int,
        seed: int = 0,
        kv_dtype: str = "float32",
    ) -> None:
        spec = model.spec
        self.model, self.sequences, self.block_size = model, sequences, block_size
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        ids = list(range(sum(needed) + 5))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        blocks = sum(needed) + 5
        self.kv = [
            tuple(_unused((blocks, block_size, *plane.shape), plane.dtype) for plane in layer.planes)
            for layer in spec.kv_layers(kv_dtype)
        ]
        self.done = [0] * len(sequences)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]
        self.layers_done: list[int] = []

    @torch.inference_mode()
    def step(self, counts: dict[int, int], offloaded: OffloadedKV | None = None) -> None:
        """Run one ragged batch: `counts[s]` more tokens of sequence s, in the order given."""
        absent = 0 if offloaded is None else offloaded.tokens // self.block_size
        batch = RaggedBatch.build(
            tokens=[self.sequences[s][self.done[s] : self.done[s] + count] for s, count in counts.items()],
            starts=[self.done[s] for s in counts],
            block_tables=[self.tables[s][absent:] for s in counts],
            block_size=self.block_size,
            logits_rows=range(sum(counts.values())),
            offloaded=offloaded,
            long_rope=[self.model.spec.rope_is_long(len(self.sequences[s])) for s in counts],
        )
        for s, logits in zip(counts, self.compute(batch).split(list(counts.values())), strict=True):
            self.logits[s].append(logits)
            self.done[s] += counts[s]

    def compute(self, batch: RaggedBatch) -> Tensor:
        """Logits [T, V] of every token of the batch."""
        return self.model.logits(self.model(batch, self.kv, self.layers_done.append))

    def result(self, sequence: int) -> Tensor:
        """Logits [len, V] of everything run of the sequence so far."""
        return torch.cat(self.logits[sequence])


def _unused(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.full(shape, 99, dtype=torch.int8) if dtype == "int8" else torch.full(shape, torch.nan)


def run_whole(run: PagedRun) -> None:
    """Every sequence in one piece, one sequence a step."""
    for s, tokens in enumerate(run.sequences):
        run.step({s: len(tokens)})


def run_chunks(run: PagedRun) -> None:
    """Every sequence in chunks of seven, one sequence a step."""
    for s, tokens in enumerate(run.sequences):
        while run.done[s] < len(tokens):
            run.step({s: min(7, len(tokens) - run.done[s])})


def run_decode(run: PagedRun) -> None:
    """The first three tokens together, then all sequences token by token in one batch."""
    run.step(dict.fromkeys(range(len(run.sequences)), 3))
    while active := {s: 1 for s, tokens in enumerate(run.sequences) if run.done[s] < len(tokens)}:
        run.step(active)


def run_mixed(run: PagedRun) -> None:
    """Random sets of sequences with random counts, in random order: chunks beside single tokens."""
    chance = random.Random(7)
    while waiting := [s for s, tokens in enumerate(run.sequences) if run.done[s] < len(tokens)]:
        chosen = chance.sample(waiting, chance.randint(1, len(waiting)))
        run.step({s: min(chance.choice((1, 1, 2, 5, 13)), len(run.sequences[s]) - run.done[s]) for s in chosen})


SCHEDULES = {"whole": run_whole, "chunks": run_chunks, "decode": run_decode, "mixed": run_mixed}
