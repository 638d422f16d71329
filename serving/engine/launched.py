"""A step whose tokens are drawn on the device and go on from there: into the next step's batch, and to the host.

It knows rows of tokens, and neither when they are wanted nor what becomes of them. On CUDA nothing but `collect` waits.

Shapes: R sequences of the step, one row each; N rows of the step that follows it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from serving.batch.device_copy import on_device
from serving.engine.overlap import Launched
from serving.engine.plan import Work
from serving.engine.run import RunResult, RunTimes
from serving.sampling.sampler import SampleRow, SamplingBackend, sampled
from serving.sampling.torch_sampling import TorchSampling
from serving.streams import Event, recorded, streams_of


class LaunchedStep(Launched):
    """`tokens` [R] int64 are what the step draws for `work`, below 0 where it cannot (serving.sampling.sampler).

    They may be memory that the forward's next call overwrites. `began` and `built` are seconds of time.perf_counter.
    """

    def __init__(self, work: Sequence[Work], tokens: Tensor, began: float, built: float):
        self.work = list(work)  # keeps the sequences alive, and so their ids
        self.rows = {id(item.seq): row for row, item in enumerate(work)}
        self.began = began
        self.built = built
        # An id even where there is no token: the row that follows is dropped, but must not read beyond the embedding.
        self.tokens = tokens.clamp(min=0)
        self._host, self._copied = to_host(tokens)

    def followed(self, tokens: Tensor, rows: Sequence[int | None]) -> Tensor:
        """A batch's `tokens` [N] with those of this step's rows put where `rows` names one, in `tokens`' order."""
        places = [place for place, row in enumerate(rows) if row is not None]
        sources = [row for row in rows if row is not None]
        drawn = self.tokens
        if sources != list(range(len(drawn))):
            drawn = drawn.index_select(0, on_device(sources, torch.int64, drawn.device))
        if len(places) == len(tokens):
            return drawn
        return tokens.index_copy(0, on_device(places, torch.int64, tokens.device), drawn)

    def collect(self) -> RunResult:
        self._copied.synchronize()
        drawn = [[sampled(token)] for token in self._host.tolist()]
        return RunResult(drawn, {}, RunTimes(self.built - self.began, time.perf_counter() - self.built, 0.0))


def to_host(tokens: Tensor) -> tuple[Tensor, Event]:
    """A copy on the host of tokens [R], and what to wait for before it is read."""
    streams = streams_of(tokens.device)
    host = streams.pinned(tokens.nbytes).view(tokens.dtype)
    host.copy_(tokens, non_blocking=True)
    return host, recorded(streams)


def draw(backend: SamplingBackend, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """What `backend` chooses of `logits` [R, V], int64 [R] on their device; it waits for that where it must."""
    if type(backend) is TorchSampling:
        return backend.on_device(logits, rows)
    return on_device(backend.sample(logits, rows), torch.int64, logits.device)
