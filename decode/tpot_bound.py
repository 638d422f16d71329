"""Whether a decode worker may take one more lease without its steps becoming too long for a TPOT objective.

Pure: no torch, no clock, no I/O. It knows what the leases' sequences hold and ask for, and neither blocks nor routers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import exp, inf
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
LATELY = 30.0  # seconds that room is kept at most for more important requests like those that came
MOST_REMEMBERED = 32  # kinds of them


class LeaseBound(Protocol):
    """Refuses leases beside those that are held."""

    def check(self, order: LeaseOrder, held: Collection[SequenceState], now: float) -> None:
        """Raises NoRoom."""

    def ended(self, seq: SequenceState, now: float) -> None:
        """A lease is held no more, for whatever reason."""


class Unbound(LeaseBound):
    def check(self, order: LeaseOrder, held: Collection[SequenceState], now: float) -> None:
        """Every lease is welcome."""

    def ended(self, seq: SequenceState, now: float) -> None:
        """Nothing depends on it."""


class TpotBound(LeaseBound):
    """A lease is refused where the step of all leases, their KV grown, takes more than `share` of the tightest TPOT.

    One whose prompt is still computed elsewhere counts as much as leases decode of the time they are held, and not at
    all once its first token is late: prompts that are late come one by one, whenever others leave time.

    The tightest is that of the sequences no less important than the new one, its own, and that of more important ones
    that have come lately. Beside more important ones it may take YIELD_SHARE of that alone, if a sequence fits there
    at all: so the next of these finds room at once, and need not wait until a text ends. Objectives count that can be
    met: not those missed already, nor those that this worker could not meet for the sequence alone. A worker that
    holds nothing refuses nobody, and a text that has begun is never refused: to move it costs more than a slow token.

    For those that came lately room is kept in proportion to what they took: for LATELY after the last of them if texts
    of HORIZON tokens in all had ended before it, for a tenth of that after a tenth of them. One that less important
    leases kept out is waiting: for its like room is kept as long, in proportion to its tokens in those of the new one.
    Nobody else who is refused counts.

    Where `prompts` are computed here only what decodes counts: chunks by slack hold the others back until there is
    room, and by their due times, which a queue elsewhere might not.
    """

    def __init__(self, cost: Callable[[], StepCost | None], share: float, *, prompts: bool = False):
        self.cost = cost
        self.share = share
        self.prompts = prompts
        self._lately: dict[tuple[int, float], AskedLately] = {}  # by priority and TPOT objective
        self._decoding = Share()

    def check(self, order: LeaseOrder, held: Collection[SequenceState], now: float) -> None:
        model, waiting = self.cost(), 0.0
        decoding = sum([len(seq.tokens) > seq.start for seq in held])  # the first was drawn here, or came with its KV
        if not self.prompts:
            held = [
                seq for seq in held if len(seq.tokens) > seq.start or seq.order.generated or seq.objectives.due > now
            ]
            waiting = self._decoding.look(decoding, len(held), now)
        if model is None or not model.samples or order.generated:
            return
        new = _NewLease.of(order, model)
        if not (held if waiting else decoding):
            self._note(new, now, kept_out=False)
            return
        tightest = min(new.tpot, YIELD_SHARE * self._kept_from(new, model, now))
        rows = as_important = 1.0  # of a step, as many as are expected, and the tokens they attend to
        context = important_context = float(new.length)
        for seq in held:
            tokens, goals = len(seq.tokens), seq.objectives
            counts = 1.0 if tokens > seq.start else waiting
            if not counts:
                continue
            left = seq.most - tokens
            length = tokens + (HORIZON if left > HORIZON else left)
            rows += counts
            context += counts * length
            if goals.priority > new.priority:
                continue
            as_important += counts
            important_context += counts * length
            least = goals.tpot if goals.priority == new.priority else YIELD_SHARE * goals.tpot
            if least < tightest:
                tightest = min(tightest, self._allowed(seq, length, new, model))
        step, allowed = model.decode_seconds(rows, context), self.share * tightest
        if step <= allowed:
            self._note(new, now, kept_out=False)
            return
        if model.decode_seconds(as_important, important_context) <= allowed:
            self._note(new, now, kept_out=True)
        raise NoRoom(
            f"with one more sequence a step would take {step * 1e3:.0f} ms, and for the TPOT of others or its own"
            f" it may take {allowed * 1e3:.0f} ms",
            code="tpot",
        )

    def ended(self, seq: SequenceState, now: float) -> None:
        asked = self._lately.get((seq.objectives.priority, seq.objectives.tpot))
        if asked is not None:
            asked.ended(len(seq.tokens) - seq.start, now)

    def _allowed(self, seq: SequenceState, length: int, new: _NewLease, model: StepCost) -> float:
        """The step that a held sequence of this length, no less important, allows beside a new one. Seconds."""
        other = seq.objectives
        if other.missed or not _attainable(model, other.tpot, length):
            return inf
        yields = other.priority < new.priority and self._roomy(model, other.tpot, length)
        return YIELD_SHARE * other.tpot if yields else other.tpot

    def _roomy(self, model: StepCost, tpot: float, length: int) -> bool:
        """True if a sequence with this objective fits into what less important ones are held to."""
        return _attainable(model, self.share * YIELD_SHARE * tpot, length)

    def _note(self, new: _NewLease, now: float, *, kept_out: bool) -> None:
        if new.tpot == inf:
            return
        asked = self._lately.pop((new.priority, new.tpot), None) or AskedLately(now)
        self._lately[new.priority, new.tpot] = asked
        asked.came(new, now, kept_out)
        if len(self._lately) > MOST_REMEMBERED:
            del self._lately[next(iter(self._lately))]

    def _kept_from(self, new: _NewLease, model: StepCost, now: float) -> float:
        """The tightest TPOT that more important requests have asked for lately, and room is still kept for. Seconds."""
        found = (
            tpot
            for (priority, tpot), asked in self._lately.items()
            if priority < new.priority and asked.keeps_from(new, now) and self._roomy(model, tpot, asked.length)
        )
        return min(found, default=inf)


@dataclass(frozen=True, slots=True)
class _NewLease:
    """What is asked for: `tokens` of text, `length` with its prompt, `tpot` infinite where it cannot be met."""

    priority: int
    tpot: float
    tokens: int
    length: int

    @staticmethod
    def of(order: LeaseOrder, model: StepCost) -> _NewLease:
        request = order.request
        tokens = min(HORIZON, request.sampling.max_tokens)
        length = len(request.prompt) + tokens
        tpot = inf if request.slo.tpot_ms is None else request.slo.tpot_ms / 1e3
        return _NewLease(request.priority, tpot if _attainable(model, tpot, length) else inf, tokens, length)


@dataclass(slots=True)
class AskedLately:
    """What requests of one priority and TPOT objective have taken, and whether the last was kept out. Tokens."""

    at: float  # seconds; when the last of them came or ended
    drawn: float = 0.0  # by those that have ended; they fade
    before: float = 0.0  # the last one
    waiting: int = 0  # what the last one asked for, if it was kept out
    length: int = 0  # of the last, with its prompt

    def came(self, new: _NewLease, now: float, kept_out: bool) -> None:
        self._fade(now)
        self.waiting, self.length = new.tokens if kept_out else 0, new.length

    def ended(self, tokens: int, now: float) -> None:
        self._fade(now)
        self.drawn += tokens

    def _fade(self, now: float) -> None:
        self.drawn *= exp(-max(0.0, now - self.at) / LATELY)
        self.at, self.before = now, self.drawn

    def keeps_from(self, new: _NewLease, now: float) -> bool:
        part = max(self.before / HORIZON, self.waiting / max(1, new.tokens))
        return now - self.at < LATELY * min(1.0, part)


def _attainable(model: StepCost, tpot: float, length: int) -> bool:
    return model.decode_seconds(1, length) <= tpot < inf
