"""Which running sequences pause, so that prompts are in time: less important ones whose tokens are due at no time.

Pure: no torch, no clock, no I/O. It sees what runs and what waits, and says who is left out of a step; the step is
planned by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from operator import attrgetter

from prefill.chunking import FLOOR, LEAN_STEPS, certain
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

    def __init__(self, cost: Cost, prompts: Callable[[], Iterable[SequenceState]], tokens: int):
        """`prompts` are those that could be computed now; a step has `tokens` at most."""
        self.cost = cost
        self.prompts = prompts
        self.tokens = tokens
        self._paused = 0  # steps in a row

    def beyond(self, running: Sequence[SequenceState], now: float) -> float:
        """Sequences less important than this priority pause if their tokens are due at no time; infinite: none do."""
        found = self._pressing(running, now) if self._paused < LEAN_STEPS - 1 else inf
        self._paused = self._paused + 1 if found < inf else 0
        return found

    def _pressing(self, running: Sequence[SequenceState], now: float) -> float:
        """The priority of the most important prompt that is in time only if others pause."""
        able = [seq for seq in running if seq.objectives.origin == inf]
        last = max([seq.objectives.priority for seq in able], default=-inf)
        due = [seq for seq in self.prompts() if seq.objectives.due < inf] if able else []
        waiting, model = [seq for seq in due if seq.objectives.priority < last], self.cost()
        if not waiting or model is None or not model.samples:
            return inf
        waiting.sort(key=_most_important_first)
        rest = [seq for seq in running if seq.objectives.origin < inf]
        beside, without = _Pace.of(running, model, self.tokens), _Pace.of(rest, model, self.tokens)
        slow = quick = 0.0  # seconds until the prompts so far are computed, beside all and without those that may pause
        for seq in waiting:
            left, own = seq.objectives.due - now, without.seconds(seq)
            if quick + own > left:
                continue  # late in any case
            quick += own
            slow += beside.seconds(seq)
            if slow > certain(model) * left:
                return seq.objectives.priority
        return inf


class _Pace:
    """How quickly prompts are computed: `chunk` tokens a step, which takes `step` seconds without them."""

    def __init__(self, model: StepCost, step: float, chunk: int):
        self.model, self.step, self.chunk = model, step, chunk

    @staticmethod
    def of(running: Sequence[SequenceState], model: StepCost, tokens: int) -> _Pace:
        """Beside these, in steps that the tightest TPOT allows on and on, whatever sequences are early by."""
        rows, context = len(running), sum([len(seq.tokens) for seq in running])
        load, most = StepLoad(rows, context, rows, context), max(1, tokens - rows)
        tightest = min([seq.objectives.tpot for seq in running if seq.objectives.origin < inf], default=inf)
        if tightest < inf:
            most = min(most, max(FLOOR // LEAN_STEPS, model.chunk_within(tightest, 0, load, most)))
        return _Pace(model, model.seconds(load) + model.sequence, most)

    def seconds(self, seq: SequenceState) -> float:
        """Of what is left of the prompt, were it the only one."""
        start, count = seq.computed, len(seq.tokens) - seq.computed
        return count * (self.model.token + self.step / self.chunk + self.model.pair * (start + count / 2))
