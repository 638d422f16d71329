"""What a prompt waits for in a worker's queue, and what it costs those it passes, once more and as said, one by one."""

from __future__ import annotations

from operator import itemgetter

from router.calibration import Drift
from router.candidate import Candidate, QueuedPrompt
from router.chances import within
from router.predict import _due, _level, backlog_seconds
from serving.step_cost import StepCost


def queue_seconds(worker: Candidate, cost: StepCost, prompt: QueuedPrompt, now: float) -> float:
    """As QueuePlace.queue_seconds says."""
    left = backlog_seconds(worker, cost, now)
    if not worker.queued:
        return left
    ahead = every = 0.0
    for other in worker.queued:
        seconds = other.seconds * other.share
        every += seconds
        if _passed_by(other, prompt, now):
            ahead += seconds
    others, doubt = left - every, prompt.seconds if worker.strangers else 0.0
    if others <= 0.0:
        return ahead
    return ahead + others * ((ahead + doubt) / (every + doubt) if every + doubt > 0.0 else 1.0)


def queued_lost(worker: Candidate, cost: StepCost, prompt: QueuedPrompt, drift: Drift, now: float) -> float:
    """As QueuePlace.queued_lost says, with every chance computed."""
    if not worker.queued:
        return 0.0
    ends, behind = 0.0, list[tuple[int, float, QueuedPrompt]]()
    for other in worker.queued:
        if _passed_by(other, prompt, now):
            ends += drift.factor * other.seconds * other.share
        elif now + other.seconds <= other.due:
            behind.append((_level(other, now), _due(other, now), other))
    lost, added = 0.0, drift.factor * prompt.seconds
    for _, due, other in sorted(behind, key=itemgetter(0, 1)):
        ends += drift.factor * other.seconds * other.share
        if due > now:
            lost += within(due - now, ends, drift.error) - within(due - now, ends + added, drift.error)
    return max(0.0, lost)


def _passed_by(other: QueuedPrompt, prompt: QueuedPrompt, now: float) -> bool:
    """True if a prompt that waits is computed before one that comes now: of the same level only if it can be in time.

    What has no objective is late for none.
    """
    level = _level(other, now)
    if level != prompt.priority:
        return level < prompt.priority
    return now + other.seconds <= other.due and _due(other, now) <= _due(prompt, now)
