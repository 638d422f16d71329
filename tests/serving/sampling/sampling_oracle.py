"""Sampling written down the slow and obvious way, one token at a time: what the sampler is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from serving.sampling.randomness import uniforms
from serving.sampling.sampler import SampleRow


def processed(logits: Sequence[float], row: SampleRow) -> list[float]:
    """Logits after bias, the stop mask and penalties, in float32 arithmetic."""
    params = row.params
    values = [np.float32(value) for value in logits]
    for token, bias in params.logit_bias:
        values[token] += np.float32(bias)
    if len(row.output_tokens) < params.min_tokens:
        for token in (*row.eos_token_ids, *params.stop_token_ids):
            values[token] = np.float32(-np.inf)
    for token in {*row.prompt_tokens, *row.output_tokens}:
        penalty = np.float32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(row.output_tokens).items():
        values[token] -= np.float32(count) * np.float32(params.frequency_penalty)
        values[token] -= np.float32(params.presence_penalty)
    return [float(value) for value in values]


def tempered(logits: Sequence[float], temperature: float) -> list[float]:
    """The logits less their highest, by the temperature, in float32 arithmetic."""
    peak, divisor = np.float32(max(logits)), np.float32(temperature)
    return [float((np.float32(value) - peak) / divisor) for value in logits]


def probabilities(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(value) for value in logits]
    return [weight / sum(weights) for weight in weights]


def kept(logits: Sequence[float], row: SampleRow) -> tuple[list[int], float]:
    """The ids that pass min-p, top-k and top-p of tempered logits, best first.

    And how close top-p or min-p came to another answer.
    """
    chances = probabilities(logits)
    params = row.params
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = chances[ranked[0]]
    lesser = [chances[token] for token in ranked if chances[token] < best] if params.min_p else []
    margin = min((abs(chance - params.min_p * best) for chance in lesser), default=1.0)
    ranked = [token for token in ranked if chances[token] >= params.min_p * best]
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p == 1.0:
        return ranked, margin
    total = sum(chances[token] for token in ranked)
    nucleus: list[int] = []
    mass = 0.0
    for token in ranked:
        margin = min(margin, abs(mass - params.top_p * total))
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += chances[token]
    return nucleus, margin


def token(logits: Sequence[float], row: SampleRow) -> tuple[int, float]:
    """The token to draw, and how close the choice came to another one (0 is a coin's edge)."""
    values = processed(logits, row)
    if row.params.temperature == 0.0:
        return max(range(len(values)), key=lambda token: (values[token], -token)), 1.0
    values = tempered(values, row.params.temperature)
    chances = probabilities(values)
    ids, margin = kept(values, row)
    target = float(uniforms([row.params.seed], [row.position])[0]) * sum(chances[token] for token in ids)
    mass = 0.0
    for chosen in sorted(ids):
        margin = min(margin, abs(mass - target)) if mass else margin
        mass += chances[chosen]
        if mass > target:
            return chosen, min(margin, mass - target)
    raise AssertionError("the target lies past the last token")
