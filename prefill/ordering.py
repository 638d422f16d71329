"""In which order waiting prompts are computed: first come, first served, or by class, tenant and how they can be met.

Pure: no torch, no clock, no I/O. It knows neither blocks nor the rest of the step, and takes nothing from anyone.

The key is that of QoServe (arXiv 2503.22562): due time + α · what is left of the prompt. α = 0 is earliest deadline
first, which is best while all can be met and collapses beyond; a large α is shortest remaining first, which is best
beyond. So α grows with the load. Ageing bounds how long anyone is passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Protocol

from prefill.fairness import FairPrompts, of_several
from serving.engine.sequence import SequenceState
from serving.step_cost import StepCost

Cost = Callable[[], StepCost | None]
"""The worker's fitted step cost; None, or one without samples, as long as it says nothing."""

AGE = 30.0  # seconds of waiting that raise a prompt by STEP
STEP = 100  # priorities: as many as lie between one service class and the next
UNHURRIED = 10.0  # seconds after its arrival that a prompt without a TTFT objective is treated as due
MOST_ALPHA = 8.0  # seconds of due time that a second of remaining work weighs under load; QoServe's ratio of α


class PromptOrder(Protocol):
    """Puts the queue into the order in which prompts are given tokens and blocks."""

    def sort(self, queue: list[SequenceState], chunk: int, beside: int, now: float) -> None:
        """In place. A step computes about `chunk` prompt tokens, `beside` so many sequences that decode."""

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        """The prompt comes into the queue, which does not hold it yet."""

    def computing(self, seq: SequenceState, tokens: int) -> None:
        """A step computes so many tokens of the prompt."""


class FirstComeFirstServed(PromptOrder):
    def sort(self, queue: list[SequenceState], chunk: int, beside: int, now: float) -> None:
        """As they came."""

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        """It is the last."""

    def computing(self, seq: SequenceState, tokens: int) -> None:
        """Nothing depends on it."""


class SlackOrder(PromptOrder):
    """By priority, which waiting raises; those that can still be in time first; then by due time + α · remaining.

    Where some of a level would be late that way, or nobody has any objectives, tenants share it: those of the level
    go first that end first if each tenant is computed as many tokens (prefill.fairness).

    Of two prompts of priorities p and q, the first is never behind the second if that came later by
    ((p − q) / STEP + 1) · AGE seconds: so nobody starves. Prompts of one tenant without any objectives keep the order
    they came in, and the whole queue does while nobody has any and all are one tenant's.
    """

    def __init__(self, cost: Cost):
        self.cost = cost
        self.fair = FairPrompts()

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        self.fair.arrived(seq, queue)

    def computing(self, seq: SequenceState, tokens: int) -> None:
        self.fair.computing(seq, tokens)

    def sort(self, queue: list[SequenceState], chunk: int, beside: int, now: float) -> None:
        if len(queue) < 2:
            return
        stated = any(seq.objectives.due != inf or seq.objectives.priority for seq in queue)
        several = of_several(queue)
        if not (stated or several):
            return
        remaining = self._remaining(queue, chunk, beside)
        alpha = load_weight(queue, remaining)
        seconds = dict(zip(queue, remaining, strict=True))
        keys = {seq: turn(seq, seconds[seq], now, alpha) for seq in queue}
        if stated:
            queue.sort(key=keys.__getitem__)
        levels = {seq: key[0] for seq, key in keys.items()}
        shared = (late_levels(queue, seconds, levels, now) if stated else set(levels.values())) if several else set()
        if shared:
            turns = self.fair.turns(queue, levels)
            queue.sort(key=lambda seq: (levels[seq], turns[seq] if levels[seq] in shared else 0))

    def _remaining(self, queue: Sequence[SequenceState], chunk: int, beside: int) -> list[float]:
        """Predicted seconds of what is left of each prompt, were it the only one; 0 where nothing is known."""
        cost = self.cost()
        if cost is None or not cost.samples:
            return [0.0] * len(queue)
        step = cost.fixed + cost.sequence + beside * (cost.token + cost.sequence)
        each, pair = cost.token + step / max(1, chunk), cost.pair
        left = [(len(seq.tokens) - seq.computed, seq.computed) for seq in queue]
        return [count * (each + pair * (start + count / 2)) for count, start in left]


def turn(seq: SequenceState, seconds: float, now: float, alpha: float) -> tuple[float, bool, float]:
    """What the queue is ordered by: the level of a prompt, whether it is late, and when it is due. It takes `seconds`.

    A prompt that comes now with a TTFT objective has the turn (priority, False, now + objective).
    """
    goals, since = seq.objectives, seq.prefill.waiting_since
    level, due = goals.priority - STEP * ((now - since) // AGE), goals.due
    return (level, False, since + UNHURRIED) if due == inf else (level, now + seconds > due, due + alpha * seconds)


def late_levels(
    queue: Sequence[SequenceState],
    seconds: Mapping[SequenceState, float],
    levels: Mapping[SequenceState, float],
    now: float,
) -> set[float]:
    """The levels with prompts that are late if they are computed in this order, each in so many `seconds`."""
    end, found = now, set()
    for seq in queue:
        end, due = end + seconds[seq], seq.objectives.due
        if end > (due if due < inf else seq.prefill.waiting_since + UNHURRIED):
            found.add(levels[seq])
    return found


def load_weight(queue: Sequence[SequenceState], remaining: Sequence[float]) -> float:
    """α: 1 while all that waits takes less than half the time prompts have, MOST_ALPHA from one and a half on."""
    patience = [seq.objectives.due - seq.prefill.waiting_since for seq in queue if seq.objectives.due != inf]
    given = sum(patience) / len(patience) if patience else 0.0
    if given <= 0.0:
        return MOST_ALPHA
    return 1.0 + (MOST_ALPHA - 1.0) * min(1.0, max(0.0, sum(remaining) / given - 0.5))
