"""In which order waiting prompts are computed: first come, first served, or by their class and by how they can be met.

Pure: no torch, no clock, no I/O. It knows neither blocks nor the rest of the step, and takes nothing from anyone.

The key is that of QoServe (arXiv 2503.22562): due time + α · what is left of the prompt. α = 0 is earliest deadline
first, which is best while all can be met and collapses beyond; a large α is shortest remaining first, which is best
beyond. So α grows with the load. Ageing bounds how long anyone is passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

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


class FirstComeFirstServed(PromptOrder):
    def sort(self, queue: list[SequenceState], chunk: int, beside: int, now: float) -> None:
        """As they came."""


class SlackOrder(PromptOrder):
    """By priority, which waiting raises; those that can still be in time first; then by due time + α · remaining.

    Of two prompts of priorities p and q, the first is never behind the second if that came later by
    ((p − q) / STEP + 1) · AGE seconds: so nobody starves. Prompts without any objectives keep the order they came in,
    and the whole queue does while nobody has any.
    """

    def __init__(self, cost: Cost):
        self.cost = cost

    def sort(self, queue: list[SequenceState], chunk: int, beside: int, now: float) -> None:
        if len(queue) < 2 or not any(seq.objectives.due != inf or seq.objectives.priority for seq in queue):
            return
        remaining = self._remaining(queue, chunk, beside)
        alpha = load_weight(queue, remaining)
        keys = {seq: turn(seq, seconds, now, alpha) for seq, seconds in zip(queue, remaining, strict=True)}
        queue.sort(key=keys.__getitem__)

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


def load_weight(queue: Sequence[SequenceState], remaining: Sequence[float]) -> float:
    """α: 1 while all that waits takes less than half the time prompts have, MOST_ALPHA from one and a half on."""
    patience = [seq.objectives.due - seq.prefill.waiting_since for seq in queue if seq.objectives.due != inf]
    given = sum(patience) / len(patience) if patience else 0.0
    if given <= 0.0:
        return MOST_ALPHA
    return 1.0 + (MOST_ALPHA - 1.0) * min(1.0, max(0.0, sum(remaining) / given - 0.5))
