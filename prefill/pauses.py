"""Which running sequences pause, so that prompts are in time: less important ones whose tokens are due at no time.

Pure: no torch, no clock, no I/O. It sees what runs and what waits, and says who is left out of a step; the step is
planned by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from itertools import groupby, islice
from math import inf
from operator import attrgetter

from prefill.chunking import LEAN_STEPS, certain, hopeless
from prefill.ordering import Cost
from serving.engine.sequence import SequenceState
from serving.step_cost import StepCost, StepLoad

MOST_PROMPTS = 16  # that are compared with what runs, of MOST_PRIORITIES: their numbers are not multiplied
MOST_PRIORITIES = 3
LONGEST = 2.0  # seconds that a sequence pauses at most before it has a step
WORTH = 0.02  # of the time that is left to a prompt: pauses bring it so much, or nobody pauses

_most_important_first = attrgetter("objectives.priority", "objectives.due")


class DecodePauses:
    """Beside sequences with TPOT objectives a step has so many seconds: those that others decode in, prompts lack.

    Where a prompt with a TTFT objective would be late beside all that runs, by the worker's own cost model, and would
    be in time without the less important sequences that have no objective to meet, these are left out of the steps that
    compute it. Of LEAN_STEPS in a row the last has them all the same, and the first after LONGEST. Without a model
    nobody pauses.
    """

    def __init__(self, cost: Cost, prompts: Callable[[], Iterable[SequenceState]], tokens: int):
        """`prompts` are those with a TTFT objective that a step could compute; it has so many `tokens` at most."""
        self.cost = cost
        self.prompts = prompts
        self.tokens = tokens
        self._paused = 0  # steps in a row,
        self._since = 0.0  # the first of which was planned then

    def beyond(self, running: Sequence[SequenceState], now: float) -> float:
        """Sequences less important than this priority pause if their tokens are due at no time; infinite: none do."""
        over = self._paused == LEAN_STEPS - 1 or (self._paused and now - self._since >= LONGEST)
        found = inf if over else self._pressing(running, now)
        if not self._paused:
            self._since = now
        self._paused = self._paused + 1 if found < inf else 0
        return found

    def _pressing(self, running: Sequence[SequenceState], now: float) -> float:
        """The priority of the most important prompt that is in time only if others pause."""
        prompts, model = list(self.prompts()), self.cost()
        if not prompts or model is None or not model.samples:
            return inf
        last = max([seq.objectives.priority for seq in running if seq.objectives.origin == inf], default=-inf)
        found = [seq for seq in prompts if now < seq.objectives.due and seq.objectives.priority < last]
        hopeful = [seq for seq in found if now + _work(seq, model) < seq.objectives.due]
        if not hopeful:
            return inf
        waiting = nsmallest(MOST_PROMPTS, hopeful, key=_most_important_first)
        beside = _Steps(running, model, now, self.tokens)
        work, tokens = 0.0, 0  # seconds of the prompts so far, in steps that run anyway
        for priority, alike in islice(groupby(waiting, lambda seq: seq.objectives.priority), MOST_PRIORITIES):
            rest = [seq for seq in running if seq.objectives.origin < inf or seq.objectives.priority <= priority]
            without = _Steps(rest, model, now, self.tokens)
            for seq in alike:
                left, length = seq.objectives.due - now, len(seq.tokens)
                own, more = _work(seq, model), tokens + length - seq.computed
                quick = without.seconds(left, more)
                if work + own + quick > left:
                    continue  # late in any case
                work, tokens = work + own, more
                slow = beside.seconds(left, tokens)
                if work + slow > certain(model) * left and slow - quick > WORTH * left:
                    return float(priority)
        return inf


def _work(seq: SequenceState, model: StepCost) -> float:
    """Seconds of what is left of the prompt, in steps that run anyway."""
    return model.added_seconds(seq.computed, len(seq.tokens))


class _Steps:
    """Steps of running sequences, as few as there are while prompts are computed in them and no token is late."""

    def __init__(self, running: Sequence[SequenceState], model: StepCost, now: float, tokens: int):
        rows, context = len(running), sum([len(seq.tokens) for seq in running])
        self.room = max(1, tokens - rows)  # tokens of prompts that a step has at most
        self.step = model.seconds(StepLoad(rows, context, rows, context)) + model.sequence  # and a prompt's
        tightest, least = inf, dict[float, float]()
        for seq in running:
            goals = seq.objectives
            tpot = goals.tpot
            tightest = min(tightest, tpot)  # that of a text which has missed its objectives bounds pauses all the same
            if tpot > 0.0 and goals.origin < inf:
                slack = goals.slack(len(seq.tokens), now)
                if not hopeless(seq, slack, self.step):
                    least[tpot] = min(slack, least.get(tpot, inf))
        self.due = list(least.items())
        self.pause = model.pause_seconds(max(tightest, self.step))

    def seconds(self, left: float, tokens: int) -> float:
        """Of those in which so many tokens of prompts are computed, in the seconds `left`; without the prompts' own.

        Each token that is due in that time takes one.
        """
        steps = max(1.0, left / self.pause, tokens / self.room)
        for tpot, slack in self.due:
            steps = max(steps, 1.0 + (left - slack) / tpot)
        return steps * self.step
