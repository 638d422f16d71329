"""Whether a decode worker may take one more lease without its steps becoming too long for a TPOT objective.

Pure: no torch, no clock, no I/O. It knows what the leases' sequences hold and ask for, and neither blocks nor routers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from typing import Protocol

from serving.engine.sequence import SequenceState
from serving.errors import NoRoom
from serving.messages import LeaseOrder
from serving.share import Share
from serving.step_cost import StepCost

HORIZON = 256  # tokens that each sequence is taken to grow by, or as many as it may
DECODE_SHARE = 0.9  # of the tightest TPOT that steps may take by the model: it errs
MIXED_SHARE = 0.75  # where steps have prompts to compute too
YIELD_SHARE = 0.7  # of what the more important ones may take
LATELY = 30.0  # seconds that room is kept for more important requests like those that came
MOST_REMEMBERED = 32  # kinds of them


class LeaseBound(Protocol):
    """Refuses leases beside those that are held."""

    def check(self, order: LeaseOrder, held: Collection[SequenceState], now: float) -> None:
        """Raises NoRoom."""


class Unbound(LeaseBound):
    def check(self, order: LeaseOrder, held: Collection[SequenceState], now: float) -> None:
        """Every lease is welcome."""


class TpotBound(LeaseBound):
    """A lease is refused where the step of all leases, their KV grown, takes more than `share` of the tightest TPOT.

    One whose prompt is still computed elsewhere counts as much as leases decode of the time they are held, and not at
    all once its first token is late: prompts that are late come one by one, whenever others leave time.

    The tightest is that of the sequences no less important than the new one, its own, and that of more important ones
    that have come lately. Beside more important ones it may take YIELD_SHARE of that alone: so the next of these finds
    room at once, and need not wait until a text ends. Objectives count that can be met: not those missed
    already, nor those that this worker could not meet for the sequence alone. A worker that holds nothing refuses
    nobody, and a text that has begun is never refused: to move it costs more than a slow token.

    Where `prompts` are computed here only what decodes counts: chunks by slack hold the others back until there is
    room, and by their due times, which a queue elsewhere might not.
    """

    def __init__(self, cost: Callable[[], StepCost | None], share: float, *, prompts: bool = False):
        self.cost = cost
        self.share = share
        self.prompts = prompts
        self._lately: dict[tuple[int, float], float] = {}  # by priority and TPOT objective: when it was last asked for
        self._decoding = Share()

    def check(self, order: LeaseOrder, held: Collection[SequenceState], now: float) -> None:
        model = self.cost()
        held = [seq for seq in held if _decodes(seq) or seq.order.generated or seq.objectives.due > now]
        decoding = sum(_decodes(seq) for seq in held)
        waiting = 0.0 if self.prompts else self._decoding.look(decoding, len(held), now)
        if model is None or not model.samples or order.generated:
            return
        request = order.request
        new = len(request.prompt) + min(HORIZON, request.sampling.max_tokens)
        own = inf if request.slo.tpot_ms is None else request.slo.tpot_ms / 1e3
        own = own if _attainable(model, own, new) else inf
        if own < inf:
            self._note(request.priority, own, now)
        if not (held if waiting else decoding):
            return
        tightest = min(own, YIELD_SHARE * self._kept_for(request.priority, now))
        context, rows = float(new), 1.0
        for seq in held:
            counts = 1.0 if _decodes(seq) else waiting
            if not counts:
                continue
            length = len(seq.tokens) + min(HORIZON, seq.request.sampling.max_tokens - seq.output_len)
            context, rows = context + counts * length, rows + counts
            other = seq.objectives
            if other.priority > request.priority or other.missed:
                continue
            allowed = other.tpot if other.priority == request.priority else YIELD_SHARE * other.tpot
            if allowed < tightest and _attainable(model, other.tpot, length):
                tightest = allowed
        step = model.decode_seconds(rows, context)
        if step > self.share * tightest:
            raise NoRoom(
                f"with one more sequence a step would take {step * 1e3:.0f} ms, and for the TPOT of others or its own"
                f" it may take {self.share * tightest * 1e3:.0f} ms",
                code="tpot",
            )

    def _note(self, priority: int, tpot: float, now: float) -> None:
        self._lately.pop((priority, tpot), None)
        self._lately[priority, tpot] = now
        if len(self._lately) > MOST_REMEMBERED:
            del self._lately[next(iter(self._lately))]

    def _kept_for(self, priority: int, now: float) -> float:
        """The tightest TPOT that more important requests have asked for lately."""
        found = (tpot for (other, tpot), at in self._lately.items() if other < priority and now - at < LATELY)
        return min(found, default=inf)


def _decodes(seq: SequenceState) -> bool:
    """True once its first token has been drawn here, or its KV has come with one."""
    return len(seq.tokens) > seq.start


def _attainable(model: StepCost, tpot: float, length: int) -> bool:
    return model.decode_seconds(1, length) <= tpot < inf
