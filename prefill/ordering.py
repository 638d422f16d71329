"""In which order waiting prompts are computed: first come, first served, or by class, tenant and how they can be met.

Pure: no torch, no clock, no I/O. It knows neither blocks nor the rest of the step, and takes nothing from anyone.

Earliest deadline first is best while all can be in time, and collapses beyond. There the rule of Moore and Hodgson
(Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs", 1968) leaves out as few as
can be, the longest of them. Ageing bounds how long anyone is passed by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappush, heapreplace
from math import inf
from typing import Protocol

from prefill.fairness import FairPrompts, of_several
from serving.engine.ageing import level_of
from serving.engine.plan import Work
from serving.engine.sequence import SequenceState
from serving.step_cost import StepCost

Cost = Callable[[], StepCost | None]
"""The worker's fitted step cost; None, or one without samples, as long as it says nothing."""

UNHURRIED = 10.0  # seconds after its arrival that a prompt without a TTFT objective is treated as due


class PromptOrder(Protocol):
    """Puts the queue into the order in which prompts are given tokens and blocks."""

    def sort(self, queue: list[SequenceState], chunk: int, beside: Sequence[Work], now: float) -> None:
        """In place. A step computes about `chunk` prompt tokens, `beside` this work of sequences that decode."""

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        """The prompt comes into the queue, which does not hold it yet."""

    def computing(self, seq: SequenceState, tokens: int) -> None:
        """A step computes so many tokens of the prompt."""


class FirstComeFirstServed(PromptOrder):
    def sort(self, queue: list[SequenceState], chunk: int, beside: Sequence[Work], now: float) -> None:
        """As they came."""

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        """It is the last."""

    def computing(self, seq: SequenceState, tokens: int) -> None:
        """Nothing depends on it."""


class SlackOrder(PromptOrder):
    """By priority, which waiting raises; of a level first those that will be in time, the earliest due of them first.

    Those that are left out so that as many as can be are in time come behind the others of their level. Where there are
    any, or nobody has any objectives, tenants share the level: those go first that end first if each tenant is computed
    as many tokens (prefill.fairness).

    Of two prompts of priorities p and q, the first is never behind the second if that came later by
    ((p − q) / STEP + 1) · AGE seconds, and by what the first one's TTFT objective has beyond AGE: so nobody starves.
    Prompts of one tenant without any objectives keep the order they came in, and the whole queue does while nobody has
    any and all are one tenant's.
    """

    def __init__(self, cost: Cost):
        self.cost = cost
        self.fair = FairPrompts()

    def arrived(self, seq: SequenceState, queue: Sequence[SequenceState]) -> None:
        self.fair.arrived(seq, queue)

    def computing(self, seq: SequenceState, tokens: int) -> None:
        self.fair.computing(seq, tokens)

    def sort(self, queue: list[SequenceState], chunk: int, beside: Sequence[Work], now: float) -> None:
        for seq in queue:
            seq.prefill.left_out = False
        if len(queue) < 2:
            return
        stated = any(seq.objectives.due != inf or seq.objectives.priority for seq in queue)
        several = of_several(queue)
        if not (stated or several):
            return
        levels = {seq: level_of(seq, now) for seq in queue}
        shared = set(levels.values())
        if stated:
            queue.sort(key=lambda seq: (levels[seq], due_of(seq)))
            seconds = dict(zip(queue, self._remaining(queue, chunk, beside), strict=True))
            late = left_out(queue, seconds, levels, now)
            for seq in late:
                seq.prefill.left_out = True
            if late:
                queue.sort(key=lambda seq: (levels[seq], seq.prefill.left_out))
            shared = late_levels(queue, seconds, levels, now) if several else set()
        if shared and several:
            turns = self.fair.turns(queue, levels)
            queue.sort(key=lambda seq: (levels[seq], turns[seq] if levels[seq] in shared else 0))

    def _remaining(self, queue: Sequence[SequenceState], chunk: int, beside: Sequence[Work]) -> list[float]:
        """Predicted seconds of what is left of each prompt, were it the only one; 0 where nothing is known."""
        cost = self.cost()
        if cost is None or not cost.samples:
            return [0.0] * len(queue)
        step = cost.decode_seconds(len(beside), sum([len(work.seq.tokens) for work in beside])) + cost.sequence
        each, pair = cost.token + step / max(1, chunk), cost.pair
        left = [(len(seq.tokens) - seq.computed, seq.computed) for seq in queue]
        return [count * (each + pair * (start + count / 2)) for count, start in left]


def due_of(seq: SequenceState) -> float:
    """When its first token is due, or is treated as due."""
    due = seq.objectives.due
    return due if due < inf else seq.prefill.waiting_since + UNHURRIED


def turn(seq: SequenceState, seconds: float, now: float) -> tuple[float, bool, float]:
    """A prompt's place: its level, whether it is late or was left out when the queue was sorted, and when it is due.

    It takes `seconds`. A prompt that comes now with a TTFT objective has the turn (priority, False, now + objective).
    """
    return level_of(seq, now), seq.prefill.left_out or now + seconds > seq.objectives.due, due_of(seq)


def left_out(
    queue: Sequence[SequenceState],
    seconds: Mapping[SequenceState, float],
    levels: Mapping[SequenceState, float],
    now: float,
) -> set[SequenceState]:
    """Those that will be late, if each takes so many `seconds` and they go behind their level.

    As few as can be where all have objectives. The queue is in order of level and due time. Nobody is left out for a
    prompt of another level, nor for one that would be late all the same, and none that has no objective: it is treated
    as due at a time, and no objective is missed if it is late.
    """
    found = set[SequenceState]()
    level, end, whole = -inf, now, now  # whole: when all of the levels before, and of this one, are computed
    kept: list[tuple[float, int]] = []  # minus the seconds of those of this level that are in time, and their places
    for place, seq in enumerate(queue):
        if levels[seq] != level:
            level, end, kept = levels[seq], whole, []
        whole += seconds[seq]
        end += seconds[seq]
        due = seq.objectives.due
        if due == inf:
            continue
        own = -seconds[seq], place
        if end > due:
            longest = kept[0] if kept and kept[0] < own and end + kept[0][0] <= due else own
            if longest is not own:
                heapreplace(kept, own)
            end += longest[0]
            found.add(queue[longest[1]])
        else:
            heappush(kept, own)
    return found


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
