"""How waiting raises a sequence that waits for its turn, and when it ends its wait. Pure."""

from __future__ import annotations

from math import inf

from serving.engine.sequence import SequenceState
from serving.messages import LeaseOrder

AGE = 30.0  # seconds of waiting that raise a prompt by STEP
STEP = 100  # priorities: as many as lie between one service class and the next


def level_of(seq: SequenceState, now: float) -> float:
    """Its priority, raised by a class for each AGE that it has waited, first when it is due where that is later.

    It may have come a moment after `now`.
    """
    since, due = seq.prefill.waiting_since, seq.objectives.due
    if due < inf:
        since = max(since, due - AGE)  # patience that it was given is no wait
    return seq.objectives.priority - STEP * (max(0.0, now - since) // AGE)


def ends_late(order: LeaseOrder) -> bool:
    """True if its prompt ends, for its router to decide, once it is late and none of it is computed (prefill.worker).

    Waiting would raise it before others, and make them late as well. One that was late when it came was sent all the
    same, and waits as any other.
    """
    left = order.first_token_in
    return order.sheddable and not order.generated and left is not None and 0.0 < left < inf
