"""How waiting raises a sequence that waits for its turn. Pure."""

from __future__ import annotations

from math import inf

from serving.engine.sequence import SequenceState

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
