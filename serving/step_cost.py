"""What an engine step takes, as a function of what it computes: the form that workers fit and routers predict with.

Pure data and arithmetic; seconds and tokens. The form is the design's:

    fixed + token·new + pair·Σ(new × context) + sequence·sequences + context·Σ(context read)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LEAST = 1e-12  # seconds, for a step of one token: what is divided by a step's seconds stays a number
MOST = 1e4  # seconds, for one of anything: beyond that nothing was measured
GAP = 3.0  # TPOTs that a step with prompts lasts at most beside decodes, however early these are: its reader's pause
SPARED = 2.0  # standard deviations of the model's error that slack is kept for; what is kept is not lost
MOST_ERROR = 0.35
LEAST_CHUNK = 16  # prompt tokens that such steps come to at least in the mean, however little slack there is


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes, summed over its sequences.

    `pairs` are the pairs of a new token and a token it attends to; `context_tokens` the tokens whose KV is read once
    for a sequence, whatever number of new tokens it has.
    """

    new_tokens: int = 0
    pairs: float = 0.0
    sequences: int = 0
    context_tokens: float = 0.0

    @staticmethod
    def of(start: int, count: int) -> StepLoad:
        """`count` new tokens of one sequence from position `start` on."""
        return StepLoad(count, pairs(start, count), 1, start + count)

    def __add__(self, other: StepLoad) -> StepLoad:
        return StepLoad(
            self.new_tokens + other.new_tokens,
            self.pairs + other.pairs,
            self.sequences + other.sequences,
            self.context_tokens + other.context_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Coefficients of the form above, none negative. Seconds, and seconds for each of what the name counts.

    `error` is the standard deviation of ln(observed / predicted), `samples` how many steps it was fitted to: 0 where
    the coefficients are a guess made before any step was seen.
    """

    fixed: float
    token: float
    pair: float = 0.0
    sequence: float = 0.0
    context: float = 0.0
    error: float = 0.5
    samples: int = 0

    @property
    def possible(self) -> bool:
        """False for numbers that no fit can come to: it is not to be computed with."""
        numbers = (self.fixed, self.token, self.pair, self.sequence, self.context, self.error)
        return all(0.0 <= number < MOST for number in numbers) and self.fixed + self.token >= LEAST

    def decode_seconds(self, sequences: float, context: float) -> float:
        """A step of one token each for so many sequences, as many as are expected, of so many tokens in all."""
        return self.fixed + (self.token + self.sequence) * sequences + (self.pair + self.context) * context

    def seconds(self, load: StepLoad) -> float:
        """A step of this load."""
        return (
            self.fixed
            + self.token * load.new_tokens
            + self.pair * load.pairs
            + self.sequence * load.sequences
            + self.context * load.context_tokens
        )

    def chunk_seconds(self, start: int, count: int) -> float:
        """A step of `count` tokens of one prompt, from position `start` on: `seconds` of StepLoad.of, without one."""
        return (
            self.fixed
            + self.token * count
            + self.pair * pairs(start, count)
            + self.sequence
            + self.context * (start + count)
        )

    def pause_seconds(self, tpot: float) -> float:
        """What a step with prompts is planned to take at most, beside decodes of which the tightest has this TPOT."""
        return GAP * tpot * math.exp(-SPARED * min(self.error, MOST_ERROR))

    def paced_chunk(self, tpot: float, start: int, beside: float, most: int) -> int:
        """About how many tokens of a prompt, from `start` on, such a step computes: decodes are early, for the most.

        `beside` are the seconds of a step without them.
        """
        return max(min(LEAST_CHUNK, most), self.chunk_beside(self.pause_seconds(tpot), start, beside, most))

    def prompt_seconds(self, start: int, end: int, chunk: int, beside: float = 0.0) -> float:
        """Positions `start` to `end` of one prompt in chunks of `chunk` tokens, each step `beside` seconds longer."""
        count = end - start
        if count <= 0:
            return 0.0
        steps = math.ceil(count / max(1, chunk))
        read = steps * start + count * (steps + 1) / 2  # Σ over the steps of the context at their end
        each = self.fixed + self.sequence + beside
        return steps * each + self.token * count + self.pair * pairs(start, count) + self.context * read

    def queue_seconds(self, prompts: Iterable[tuple[int, int]], chunk: int, beside: StepLoad | None = None) -> float:
        """Prompts, each from a position to its end, one after the other in steps of `chunk` of their tokens.

        A step's tokens go on into the next prompt where one ends. Each step also computes `beside`: what decodes.
        """
        chunk = max(1, chunk)
        total, sequences, seen, read = 0, 0, 0.0, 0.0
        for start, end in prompts:
            count = end - start
            if count <= 0:
                continue
            first = min(count, chunk - total % chunk)
            more, last = divmod(count - first, chunk)
            sequences += 1 + more + (last > 0)
            read += start + first + more * (start + first) + chunk * more * (more + 1) / 2 + (end if last else 0)
            seen += pairs(start, count)
            total += count
        steps = math.ceil(total / chunk)
        each = self.seconds(beside if beside is not None else StepLoad())
        return steps * each + self.token * total + self.pair * seen + self.sequence * sequences + self.context * read

    def added_seconds(self, start: int, end: int) -> float:
        """What positions `start` to `end` of a prompt add to steps that run anyway. Seconds."""
        return self.token * (end - start) + self.pair * pairs(start, end - start)

    def chunk_within(self, seconds: float, start: int, beside: StepLoad, most: int) -> int:
        """The most tokens of a prompt, from `start` on, that a step beside a load can compute in so many seconds."""
        return self.chunk_beside(seconds, start, self.seconds(beside), most)

    def chunk_beside(self, seconds: float, start: int, beside: float, most: int) -> int:
        """The same beside what takes `beside` seconds by itself.

        Solves pair/2·n² + (token + pair·start + context)·n = what is left, as `pairs` grow with n². 0 where even
        one does not fit.
        """
        left = seconds - beside - self.sequence - self.context * start
        if left <= 0:
            return 0
        linear = self.token + self.pair * (start + 0.5) + self.context
        square = self.pair / 2
        if square * most * most + linear * most <= left:
            return most
        root = math.sqrt(linear * linear + 4 * square * left)
        return min(most, int(2 * left / (root + linear)))  # not (root - linear) / (2 * square): nothing is left of that


def pairs(start: int, count: int) -> float:
    """Pairs of a new token and one it attends to, itself among them: Σ (start + i) for i = 1 … count."""
    return count * start + count * (count + 1) / 2
