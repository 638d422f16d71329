"""An engine that begins the next decode step before it has read the tokens of the one that runs.

For runners whose device computes beside Python: planning, accounting and delivery then take no time of the device.
It knows no torch; how a token is drawn that Python has not seen is the runner's affair.

    step n      begun ──────────── read ── accounted, delivered
    step n+1           planned, begun ─────────────────────────── read ── ...

Step n+1 is the same sequences, one token each, but for those that can have no further token, and with those that have
joined since. Only a step in which each sequence decodes one token is followed so, and only by another; before anything
else the engine waits for the tokens. A sequence that turns out to have ended with step n keeps its blocks until
n+1 is over, and what n+1 drew for it is dropped: it appears in no output, and its KV under no key.

A step that raises, when it is begun or read, is computed again with its tokens known, and so is one that follows it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from serving.engine.blame import run_step
from serving.engine.engine import Engine
from serving.engine.plan import PlannedLoad, StepPlan, Work
from serving.engine.run import LayerDone, Runner, RunResult, RunTimes
from serving.engine.sequence import SequenceOutput, SequenceState
from serving.errors import MISTAKES

log = logging.getLogger(__name__)


class Launched(Protocol):
    """A step that has begun and whose tokens have not been read."""

    def collect(self) -> RunResult:
        """Wait for its tokens. Called once; what went wrong on the device is raised here.

        `times.batch` are the seconds its batch took to build, `times.forward` those from then on until now.
        """
        ...


class OverlapRunner(Runner, Protocol):
    """A runner that can begin a step after one that it has not been asked the tokens of."""

    def can_overlap(self, seq: SequenceState) -> bool:
        """True if each next token of the sequence is drawn without Python knowing the one before. Once so, always."""
        ...

    def launch(self, work: Sequence[Work], after: Launched | None) -> Launched:
        """Begin a step in which each sequence decodes one token, and can overlap.

        A sequence that is also part of `after`, which is not accounted for, goes on from what that draws for it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way; `launched` is None if it waits to be computed again. Seconds on the engine's clock."""

    plan: StepPlan
    launched: Launched | None
    load: PlannedLoad
    planning_seconds: float
    follows: bool  # another, which ran when this one began


class OverlapEngine(Engine):
    """See the module. `ahead` counts the steps that were begun while the one before them ran."""

    can_overlap = True
    runner: OverlapRunner
    flight: Flight | None = None  # begun by an earlier call, and not accounted for
    ahead = 0

    def step(self, layer_done: LayerDone | None = None) -> list[SequenceOutput] | None:
        """Run one step, and begin the next where that is overlappable; what the first brought out, or None."""
        began = self.clock()
        flight, outputs = self.flight, list[SequenceOutput]()
        if flight is None:
            plan, outputs = self.schedule(began)
            if not plan.work:
                return self._nothing(outputs)
            if not self._overlaps(plan):
                return outputs + self._step(plan, began, layer_done)
            self.step_began = began
            flight = self._launch(plan, None, began)
        return outputs + self._account(flight, self._follow(flight))

    def settle(self) -> list[SequenceOutput]:
        """Finish the step that has been begun ahead of its time, if one has."""
        return [] if self.flight is None else self._account(self.flight, None)

    def _overlaps(self, plan: StepPlan) -> bool:
        """True if another step may follow this one, or be followed by it, with the tokens unread."""
        return bool(plan.work) and all(work.decodes_one and self.runner.can_overlap(work.seq) for work in plan.work)

    def _follow(self, flight: Flight) -> Flight | None:
        """Begin the step after this one, which runs; None where its tokens are needed first."""
        if flight.launched is None:
            return None
        began = self.clock()
        with self.lock:
            plan = StepPlan(self.limits.max_num_batched_tokens, self.limits.max_num_seqs, ahead=True, can_overlap=True)
            filled = all(scheduler.fill_ahead(plan, began) for scheduler in self.schedulers)
            if not filled or not self._overlaps(plan):
                return None
            self.begin(plan)
        self.ahead += 1
        return self._launch(plan, flight.launched, began)

    def _launch(self, plan: StepPlan, after: Launched | None, began: float) -> Flight:
        load = plan.load()
        planned = self.clock()
        launched: Launched | None = None
        try:
            launched = self.runner.launch(plan.work, after)
        except MISTAKES:
            log.exception("a step of %d cannot be begun ahead", len(plan.work))
        return Flight(plan, launched, load, planned - began, after is not None)

    def _account(self, flight: Flight, following: Flight | None) -> list[SequenceOutput]:
        """Wait for a step's tokens, and do with them what is done after any step."""
        began = self.step_began
        assert began is not None, "a flight is a step that runs"
        result = self._collected(flight)
        if result is None:
            result = self._computed_again(flight.plan)
            following = following and replace(following, launched=None)  # it goes on from what was not drawn
        ended = self.step_began = self.clock()  # the next is the one that runs now
        self.flight = following
        outputs = self.postprocess(flight.plan, result)
        hidden, accounted = 0.0, self.clock()
        if following is not None:
            hidden = accounted - ended
        else:
            ended, self.step_began = accounted, None
        self._record_flight(flight, began, ended, result.times, hidden)
        return outputs

    def _collected(self, flight: Flight) -> RunResult | None:
        """What the step gave; None if it has to be computed again."""
        if flight.launched is None:
            return None
        try:
            return flight.launched.collect()
        except MISTAKES:
            log.exception("a step of %d that was begun ahead cannot be read", len(flight.plan.work))
            return None

    def _computed_again(self, plan: StepPlan) -> RunResult:
        """With all tokens known. Of sequences that have ended since it was planned, nothing is wanted."""
        live = [i for i, work in enumerate(plan.work) if not work.seq.ended]
        if not live:
            return RunResult([[] for _ in plan.work], {}, RunTimes(0.0, 0.0, 0.0))
        found = run_step(self.runner, [plan.work[i] for i in live], None)
        drawn = dict(zip(live, found.drawn, strict=True))
        return RunResult([drawn.get(i, []) for i in range(len(plan.work))], {}, found.times)

    def _record_flight(self, flight: Flight, began: float, ended: float, times: RunTimes, hidden: float) -> None:
        """A step lasts from the end of the one before it until its tokens are read or, if none follows, accounted for.

        What is done for it before or after that is hidden: another computes meanwhile.
        """
        schedule_seconds = flight.planning_seconds
        if flight.follows:
            hidden += schedule_seconds + times.batch
            schedule_seconds = 0.0
            times = RunTimes(0.0, min(times.forward, ended - began), times.sample)
        self._record(flight.plan, flight.load, began, ended, schedule_seconds, times, hidden)


def engine_for(device: str) -> type[Engine]:
    """The engine for a model on this torch device: one that begins ahead where that computes beside Python."""
    return OverlapEngine if device.partition(":")[0] == "cuda" else Engine
