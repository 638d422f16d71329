"""What the engine asks of the thing that computes, and what that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine.plan import Work
from serving.messages import TokenLogprob
from serving.sampling.sampler import Sampled, SamplingFailed

LayerDone = Callable[[Sequence[Work], int], None]
"""Called, on any thread, when a layer's KV of this work is written: for each layer in order, once for each work."""


@dataclass(slots=True)  # not frozen: one for every step, and frozen ones take three times as long to make
class RunTimes:
    """Seconds a run spent building its batch, in the model, and drawing tokens."""

    batch: float
    forward: float
    sample: float


@dataclass(slots=True)  # not frozen: one for every step, and frozen ones take three times as long to make
class RunResult:
    """`drawn[i]` are the draws for work i: none where its prompt goes on, else one more than it has drafted.

    `embeddings[i]` is what work i comes to instead, where an embedding is wanted and its prompt is computed.
    """

    drawn: list[list[Sampled | SamplingFailed]]
    prompt_logprobs: dict[int, list[TokenLogprob | None]]
    times: RunTimes
    embeddings: Mapping[int, bytes | SamplingFailed] = field(default_factory=dict)


class Runner(Protocol):
    """What the engine asks of the thing that computes (serving.engine.runner.ModelRunner)."""

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        """`layer_done` is told of work whose sequences are handed over, and of no other."""
        ...
