"""Whose engine is stuck: a worker that reports while a step does not end, or while no step takes up the work it has.

Pure: statuses and `now` come in, in seconds. What becomes of such a worker is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Container, Set
from dataclasses import dataclass

from serving.messages import WorkerStatus
from serving.step_cost import StepLoad

LONGER = 3.0  # times the longest step that is known or predicted: a step beyond that is not merely a long one
MOST = 6.0  # times the bound, for what was seen of long steps alone: they may have been stalls
STEPS = "engine_steps"  # of WorkerStatus.counters


@dataclass(slots=True)
class _Motion:
    """`steps` at the last report, `moved_at` when they last grew, `longest` a step has run and ended after all."""

    steps: float
    moved_at: float
    longest: float = 0.0
    stalled: float = 0.0  # age of the step in progress at the last report


class StallWatch:
    """`bound`: seconds a step may take, or work may wait for one, where nothing speaks for longer steps."""

    def __init__(self, bound: float = 10.0):
        self.bound = bound
        self._motions: dict[str, _Motion] = {}
        self._stuck: set[str] = set()  # asked for with each request, and there may be a thousand workers

    def heard(self, status: WorkerStatus, now: float) -> bool:
        """Take a report in; True if the worker is stuck now and was not before."""
        steps = status.counters.get(STEPS, 0.0)
        motion = self._motions.setdefault(status.instance, _Motion(steps, now))
        if steps != motion.steps:
            motion.longest = max(motion.longest, min(motion.stalled, MOST / LONGER * self.bound))
        if steps != motion.steps or not has_work(status):
            motion.steps, motion.moved_at = steps, now
        motion.stalled = status.stalled_seconds
        bound = self.bound_of(status)
        waits = STEPS in status.counters and now - motion.moved_at > bound
        before = status.instance in self._stuck
        if stuck := status.stalled_seconds > bound or waits:
            self._stuck.add(status.instance)
        elif before:
            self._stuck.discard(status.instance)
        return stuck and not before

    def bound_of(self, status: WorkerStatus) -> float:
        """Seconds after which this worker is stuck: a full step over its longest context may take a while."""
        motion = self._motions.get(status.instance)
        bound = max(self.bound, LONGER * motion.longest if motion is not None else 0.0)
        cost, most = status.step_cost, status.max_batched_tokens
        if cost is not None and cost.samples:
            bound = max(bound, LONGER * cost.seconds(StepLoad.of(max(0, status.max_model_len - most), most)))
        return bound

    def stuck(self, instance: str) -> bool:
        return instance in self._stuck

    def all_stuck(self) -> Set[str]:
        """The stuck workers, by instance."""
        return self._stuck

    def retain(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        for instance in [each for each in self._motions if each not in known]:
            del self._motions[instance]
            self._stuck.discard(instance)


def has_work(status: WorkerStatus) -> bool:
    return status.running + status.waiting > 0
