"""A trace of multi-turn chats as a prefix cache sees it: which blocks each turn asks for, and which it leaves behind.

Pure and seeded. Lengths come from (prompt, output) pairs; everything else is drawn here, and a block is only a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack

import numpy as np

from bench.lengths import Pair

TURNS_OF_A_PROMPT = 4  # the pairs' prompts are whole conversations up to a random turn: one message is a part of it
LEAST_MESSAGE = 4  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTraceOptions:
    """What the chats are like; times in seconds, lengths in tokens."""

    conversations: int = 2000
    hours: float = 8.0  # in which conversations begin
    block_size: int = 16
    turns_exponent: float = 1.7  # Zipf: half the conversations have a single turn, a few have dozens
    most_turns: int = 40
    context: int = 8192  # a conversation ends when it has grown beyond
    pause: float = 45.0  # median between turns, log-normal
    long_pause: float = 3600.0  # median of the others, when somebody comes back later
    long_pause_share: float = 0.15
    regenerated_share: float = 0.08  # turns that ask for another answer to the same prompt
    systems: int = 40  # system prompts, of Zipf popularity
    system_median: int = 500  # tokens, log-normal
    system_share: float = 0.8  # conversations that begin with one


@dataclass(frozen=True, slots=True)
class Turn:
    """`prompt` is the keys of the prompt's full blocks, `context` those of prompt and answer."""

    prompt: tuple[bytes, ...]
    context: tuple[bytes, ...]


def chat_turns(pairs: Sequence[Pair], options: ChatTraceOptions, seed: int) -> list[Turn]:
    """All conversations' turns in the order of time."""
    random = np.random.default_rng((seed, 0x4348))
    lengths = random.lognormal(np.log(options.system_median), 0.8, options.systems).astype(int).tolist()
    popularity = 1.0 / np.arange(1, options.systems + 1)
    popularity /= popularity.sum()
    timed: list[tuple[float, int, Turn]] = []
    for conversation in range(options.conversations):
        system = int(random.choice(options.systems, p=popularity))
        system_tokens = int(lengths[system]) if random.random() < options.system_share else 0
        time = float(random.uniform(0, 3600 * options.hours))
        for turn in _conversation(pairs, options, random, conversation, system, system_tokens):
            timed.append((time, len(timed), turn))
            long = random.random() < options.long_pause_share
            time += float(random.lognormal(np.log(options.long_pause if long else options.pause), 1.0))
    return [turn for _, _, turn in sorted(timed, key=lambda one: one[:2])]


def _conversation(
    pairs: Sequence[Pair],
    options: ChatTraceOptions,
    random: np.random.Generator,
    conversation: int,
    system: int,
    system_tokens: int,
) -> list[Turn]:
    def keys(tokens: int) -> tuple[bytes, ...]:
        shared = system_tokens // options.block_size
        return tuple(
            pack(">BII", 0, system, block) if block < shared else pack(">BII", 1, conversation, block)
            for block in range(tokens // options.block_size)
        )

    turns: list[Turn] = []
    tokens = system_tokens
    for _ in range(min(int(random.zipf(options.turns_exponent)), options.most_turns)):
        prompt, output = pairs[int(random.integers(len(pairs)))]
        if not turns or random.random() >= options.regenerated_share:
            tokens += max(LEAST_MESSAGE, prompt // TURNS_OF_A_PROMPT)
            asked = keys(tokens)
            tokens += output
        if tokens > options.context:
            break
        turns.append(Turn(asked, keys(tokens)))
    return turns
