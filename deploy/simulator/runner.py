"""Stands where the model would: says what a step takes, and draws tokens that follow from the text.

Pure. It computes no KV and reads none; the same text gives the same tokens wherever its parts are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np

from deploy.simulator.profiles import Profile, StepWork
from serving.engine.engine import LayerDone, Runner, RunResult, RunTimes
from serving.engine.plan import Work
from serving.messages import Request
from serving.sampling.sampler import Sampled, SamplingFailed

VOCABULARY = 32_000
EOS = 0

_MASK = (1 << 64) - 1
_NOISE_DRAWS = 4096  # at a time


class ScriptedTexts:
    """What the model says: each token follows from the request's seed, its position and the two tokens before it.

    A request ends with EOS as its output token number `lengths[request_id]`, counted from 1; without one it goes on to
    its `max_tokens`.
    """

    def __init__(self, lengths: Mapping[str, int] | None = None):
        self.lengths: Mapping[str, int] = lengths if lengths is not None else {}

    def next(self, request: Request, tokens: Sequence[int]) -> int:
        """The token after `tokens`, prompt and output."""
        position = len(tokens)
        if self.lengths.get(request.request_id) == position + 1 - len(request.prompt):
            return EOS
        before = tokens[-2] if position > 1 else 0
        mixed = (tokens[-1] + 0x9E3779B9 * before + 0x85EBCA77 * position + request.sampling.seed) & _MASK
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
        return 1 + (mixed >> 32) % (VOCABULARY - 1)

    def written_out(self, request: Request) -> list[int]:
        """The whole output of an undisturbed run."""
        tokens = list(request.prompt)
        for number in count(1):
            tokens.append(self.next(request, tokens))
            if tokens[-1] == EOS or number == request.sampling.max_tokens:
                break
        return tokens[len(request.prompt) :]


class ModelledRunner(Runner):
    """`noise` multiplies each step's seconds (see `lognormal`)."""

    def __init__(self, profile: Profile, texts: ScriptedTexts, noise: Callable[[], float]):
        self.profile = profile
        self.texts = texts
        self.noise = noise

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        seconds = self.profile.seconds(step_work(work)) * self.noise()
        drawn = [self._draw(item) if item.completes else [] for item in work]
        leaving = [item for item in work if item.seq.prefill.handoff is not None]
        if layer_done is not None and leaving:
            layer_done(leaving, 0)
        return RunResult(drawn, {}, RunTimes(0.0, seconds, 0.0))

    def _draw(self, work: Work) -> list[Sampled | SamplingFailed]:
        seq = work.seq
        if not work.draft:
            return [Sampled(self.texts.next(seq.request, seq.tokens))]
        known = [*seq.tokens, *work.draft]
        ends = range(len(seq.tokens), len(known) + 1)
        return [Sampled(self.texts.next(seq.request, known[:end])) for end in ends]


def step_work(work: Sequence[Work]) -> StepWork:
    """What a step computes, prompts and decoding sequences apart."""
    made = StepWork()
    for item in work:
        computed = item.seq.computed
        if item.count == 1:
            made.decoding += 1
            made.decoding_context += computed + 1
        else:
            made.add_prompt(computed, item.count)
    return made


def lognormal(sigma: float, seed: int) -> Callable[[], float]:
    """Draws of mean 1 whose logarithms have the standard deviation `sigma`; always 1 where that is 0."""
    if sigma == 0.0:
        return lambda: 1.0
    generator = np.random.default_rng((seed, 0x4E4F))
    drawn: list[float] = []

    def draw() -> float:
        if not drawn:
            drawn.extend(generator.lognormal(-sigma * sigma / 2, sigma, _NOISE_DRAWS).tolist())
        return drawn.pop()

    return draw
