"""Stands where the model would: says what a step takes, and draws the tokens of a script.

It computes no KV and reads none; neither clocks nor workers are known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deploy.simulator.profiles import Profile, StepWork
from deploy.simulator.step_records import Noise
from deploy.simulator.texts import VOCABULARY, ScriptedTexts
from serving.engine.plan import Work
from serving.engine.run import LayerDone, Runner, RunResult, RunTimes
from serving.sampling.sampler import Sampled, SamplingFailed

_NOISE_DRAWS = 4096  # at a time
# By token, one for all steps: whoever reads a draw changes nothing.
_DRAWN: list[list[Sampled | SamplingFailed]] = [[Sampled(token)] for token in range(VOCABULARY)]


class ModelledRunner(Runner):
    """`noise` multiplies each step's seconds (`lognormal`, deploy.simulator.step_records)."""

    def __init__(self, profile: Profile, texts: ScriptedTexts, noise: Noise):
        self.profile = profile
        self.texts = texts
        self.noise = noise

    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        following, made = self.texts.next, StepWork()
        drawn: list[list[Sampled | SamplingFailed]] = []
        decoding = context = 0
        leaving: list[Work] = []
        for item in work:
            seq, count = item.seq, item.count
            computed, tokens = seq.computed, seq.tokens
            if count == 1:  # add_decode without drafts, summed up
                decoding += 1
                context += computed + 1
            elif item.draft:
                made.add_decode(computed, len(item.draft))
                drawn.append(self._verify(item))
                continue
            else:
                made.add_prompt(computed, count)
            drawn.append(_DRAWN[following(seq.request, tokens)] if computed + count == len(tokens) else [])
            if not seq.stays and seq.prefill.handoff is not None:
                leaving.append(item)
        made.decoding += decoding
        made.decoding_context += context
        seconds = self.profile.seconds(made) * self.noise(made.prompts > 0)
        if layer_done is not None and leaving:
            layer_done(leaving, 0)
        return RunResult(drawn, {}, RunTimes(0.0, seconds, 0.0))

    def _verify(self, work: Work) -> list[Sampled | SamplingFailed]:
        seq = work.seq
        if not work.completes:
            return []
        known = [*seq.tokens, *work.draft]
        ends = range(len(seq.tokens), len(known) + 1)
        return [Sampled(self.texts.next(seq.request, known[:end])) for end in ends]


def lognormal(sigma: float, seed: int) -> Noise:
    """Draws of mean 1 whose logarithms have the standard deviation `sigma`, for any step; always 1 where that is 0."""
    if sigma == 0.0:
        return lambda prompts: 1.0
    generator = np.random.default_rng((seed, 0x4E4F))
    drawn: list[float] = []

    def draw(prompts: bool) -> float:
        if not drawn:
            drawn.extend(generator.lognormal(-sigma * sigma / 2, sigma, _NOISE_DRAWS).tolist())
        return drawn.pop()

    return draw
