"""Which running sequences pause, so that prompts are in time: less important ones whose tokens are due at no time.

Pure: no torch, no clock, no I/O. It sees what runs and what waits, and says who is left out of a step; the step is
planned by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter

from prefill.chunking import LEAN_STEPS, certain, hopeless
from prefill.ordering import Cost
from serving.engine.sequence import SequenceState
from serving.step_cost import StepCost, StepLoad

_most_important_first = attrgetter("objectives.priority", "objectives.due")


class DecodePauses:
    """Beside sequences with TPOT objectives a step has so many seconds: those that others decode in, prompts lack.

    Where a prompt with a TTFT objective would be late beside all that runs, by the worker's own cost model, and would
    be in time without the less important sequences that have no objective to meet, these are left out of the steps that
    compute it. Of LEAN_STEPS in a row the last has them all the same. Without a model nobody pauses.
    """

    def __init__(self, cost: Cost, prompts: Callable[[], Iterable[SequenceState]]):
        """`prompts` are those that could be computed now."""
        self.cost = cost
        self.prompts = prompts
        self._paused = 0  # steps in a row

    def beyond(self, running: Sequence[SequenceState], now: float) -> float:
        """Sequences less important than this priority pause if their tokens are due at no time; infinite: none do."""
        found = self._pressing(running, now) if self._paused < LEAN_STEPS - 1 else inf
        self._paused = self._paused + 1 if found < inf else 0
        return found

    def _pressing(self, running: Sequence[SequenceState], now: float) -> float:
        """The priority of the most important prompt that is in time only if others pause."""
        last = max([seq.objectives.priority for seq in running if seq.objectives.origin == inf], default=-inf)
        due = [seq for seq in self.prompts() if seq.objectives.due < inf] if last > -inf else []
        waiting, model = [seq for seq in due if seq.objectives.priority < last], self.cost()
        if not waiting or model is None or not model.samples:
            return inf
        waiting.sort(key=_most_important_first)
        beside = _Steps(running, model, now)
        work = 0.0  # seconds of the prompts so far, in steps that run anyway
        for priority, prompts in groupby(waiting, lambda seq: seq.objectives.priority):
            rest = [seq for seq in running if seq.objectives.origin < inf or seq.objectives.priority <= priority]
            without = _Steps(rest, model, now)
            for seq in prompts:
                left, own = seq.objectives.due - now, model.added_seconds(seq.computed, len(seq.tokens))
                if work + own + without.seconds(left) > left:
                    continue  # late in any case
                work += own
                if work + beside.seconds(left) > certain(model) * left:
                    return float(priority)
        return inf


class _Steps:
    """Steps of running sequences, as few as there are while prompts are computed in them and no token is late."""

    def __init__(self, running: Sequence[SequenceState], model: StepCost, now: float):
        rows, context = len(running), sum([len(seq.tokens) for seq in running])
        self.step = model.seconds(StepLoad(rows, context, rows, context)) + model.sequence  # and a prompt's
        tightest, self.due = inf, list[tuple[float, float]]()
        for seq in running:
            goals = seq.objectives
            if goals.origin < inf:
                tightest, slack = min(tightest, goals.tpot), goals.slack(len(seq.tokens), now)
                if not hopeless(seq, slack, self.step):
                    self.due.append((goals.tpot, slack))
        self.pause = model.pause_seconds(max(tightest, self.step))

    def seconds(self, left: float) -> float:
        """Of those in so many seconds, without prompts: each token that is due in that time takes one."""
        steps = left / self.pause
        for tpot, slack in self.due:
            steps = max(steps, 1.0 + (left - slack) / tpot)
        return max(1.0, steps) * self.step
