"""The ranks of a layout as one worker of this process, each rank with its share of a model and of the KV."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from kvcache.memory.device import DeviceKV
from serving.batch.ragged import RaggedBatch
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.parallel.applying import apply_parallel
from serving.parallel.holding import hold_share
from serving.parallel.layout import ParallelLayout
from tests.serving.parallel.groups import Threads

BLOCK_SIZE = 4


class ParallelWorker:
    """The ranks of one layout, threads of this process, each with its share of the model and its own KV."""

    def __init__(self, path: Path, layout: ParallelLayout, threads: Threads, table: list[int], kv_dtype: str) -> None:
        self.layout, self.threads, self.table = layout, threads, table
        self.models = threads.each(partial(self._loaded, path))
        self.kv = [DeviceKV(model.spec.kv_layers(kv_dtype), 6, BLOCK_SIZE) for model in self.models]

    def _loaded(self, path: Path, rank: int) -> Decoder:
        model = load(path, "float32", layout=partial(hold_share, layout=self.layout, rank=rank)).model
        return apply_parallel(model, self.threads.ranks[rank])

    def step(self, tokens: list[int], start: int) -> int:
        """The next token, on which all ranks agree."""
        (token,) = set(self.threads.each(lambda rank: self.step_of(rank, tokens, start)))
        assert token is not None
        return token

    @torch.inference_mode()
    def step_of(self, rank: int, tokens: list[int], start: int, *, logits: bool = True) -> int | None:
        """One rank's part in a step, and the next token, unless no logits are wanted."""
        batch = RaggedBatch.build(
            tokens=[tokens],
            starts=[start],
            block_tables=[self.table],
            block_size=BLOCK_SIZE,
            logits_rows=None if logits else [],
        )
        model = self.models[rank]
        scores = model.logits(model(batch, self.kv[rank].planes)[batch.logits_rows])
        return int(scores[0].argmax()) if logits else None
