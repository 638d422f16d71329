"""Prompt and output lengths like those of real chats: a small table fitted to ShareGPT, or the pairs of a file.

Pure but for reading the file that `read_pairs` is given; it knows nothing of prompts, servers or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson

Pair = tuple[int, int]  # (prompt tokens, output tokens)

# Fitted to 1,600 ShareGPT conversations of at least three turns, cut at a random turn, prompt + output < 2,048.
# Lengths are interpolated on a log scale between these quantiles. The output's quantiles depend on the prompt's
# octile: short prompts ask for long answers, and long ones leave little room for any.
PROMPT_LEVELS = (0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1)
PROMPT_TOKENS = (2, 13, 25, 89, 165, 244, 375, 512, 680, 857, 1042, 1272, 1543, 1723, 1862, 2031)
OUTPUT_LEVELS = (0, 0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95, 0.99, 1)
OUTPUT_TOKENS_BY_OCTILE = (
    (2, 9, 15, 43, 122, 202, 253, 356, 626, 801, 999, 1809),
    (2, 7, 10, 16, 32, 65, 114, 224, 384, 497, 742, 1215),
    (2, 6, 9, 14, 24, 50, 140, 302, 417, 623, 924, 1106),
    (2, 6, 9, 21, 54, 127, 218, 367, 594, 670, 1020, 1174),
    (2, 4, 7, 18, 43, 96, 189, 384, 654, 773, 985, 1027),
    (2, 5, 11, 20, 38, 77, 179, 324, 541, 747, 1019, 1085),
    (2, 6, 9, 17, 29, 57, 129, 295, 483, 604, 671, 786),
    (1, 2, 7, 13, 23, 33, 54, 146, 319, 373, 463, 481),
)
CONTEXT = 2048  # tokens of the model the conversations were cut for


def sharegpt_pairs(count: int, seed: int) -> list[Pair]:
    """`count` pairs with ShareGPT's joint distribution; the same seed gives the same pairs."""
    draws = np.random.default_rng((seed, 0x5347)).random((count, 2))
    pairs = []
    for prompt_level, output_level in draws:
        prompt = _quantile(prompt_level, PROMPT_LEVELS, PROMPT_TOKENS)
        octile = OUTPUT_TOKENS_BY_OCTILE[int(prompt_level * len(OUTPUT_TOKENS_BY_OCTILE))]
        output = _quantile(output_level, OUTPUT_LEVELS, octile)
        pairs.append((prompt, min(output, CONTEXT - prompt)))
    return pairs


def resampled_pairs(pairs: Sequence[Pair], count: int, seed: int) -> list[Pair]:
    """`count` pairs drawn from `pairs`: without repeats while they last."""
    order = np.random.default_rng((seed, 0x5253))
    drawn: list[Pair] = []
    while len(drawn) < count:
        drawn.extend(pairs[index] for index in order.permutation(len(pairs))[: count - len(drawn)])
    return drawn


def read_pairs(path: Path) -> list[Pair]:
    """A JSON file of [[prompt tokens, output tokens], …]; raises ValueError naming what is wrong with it."""
    try:
        pairs = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"--lengths {path}: {error}") from error
    if not isinstance(pairs, list) or not pairs:
        raise ValueError(f"--lengths {path}: expected a list of [prompt tokens, output tokens] pairs")
    for number, pair in enumerate(pairs):
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(value) is int and value > 0 for value in pair)
        if not whole:
            raise ValueError(f"--lengths {path}: entry {number} is {pair!r}, not two positive whole numbers")
    return [(prompt, output) for prompt, output in pairs]


def _quantile(level: float, levels: Sequence[float], tokens: Sequence[int]) -> int:
    return round(float(np.exp(np.interp(level, levels, np.log(tokens)))))
