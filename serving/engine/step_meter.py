"""What a worker knows of its own pace: the fit of its steps' cost, and how much of its time goes to prompts.

Pure: records of steps come in on the engine's thread, questions with their `now` on any other.
"""

from __future__ import annotations

import math

from serving.engine.plan import StepRecord
from serving.engine.step_fit import StepFit
from serving.step_cost import StepCost

SHARE_SECONDS = 10.0  # after which what a worker did counts for about a third in `prompt_share`


class StepMeter:
    """`cost` is for schedulers: what steps take, as of the last fit."""

    def __init__(self, fit: StepFit):
        self.fit = fit
        self._share = 0.0
        self._ended: float | None = None  # the last step, on the engine's clock

    def stepped(self, record: StepRecord) -> None:
        """A step that computed something has ended."""
        prompts, cadence = record.prompt_tokens > 0, record.cadence_seconds
        self.fit.observe(record.load, cadence, prompts=prompts)
        ended = record.began + record.step_seconds
        passed = cadence if self._ended is None else max(cadence, ended - self._ended)
        if passed > 0.0:
            found = cadence / passed if prompts else 0.0
            self._share += (1.0 - math.exp(-passed / SHARE_SECONDS)) * (found - self._share)
        self._ended = ended

    def prompt_share(self, now: float) -> float:
        """The share of recent time, idle time too, that went to steps with prompt tokens; `now` on the engine's clock.

        Prompts come while a sequence decodes as often as they come at other times, so this is what they take of its
        time. Of the time in steps alone they take more: where few sequences come, nothing else runs beside them.
        """
        idle = 0.0 if self._ended is None else max(0.0, now - self._ended)
        return self._share * math.exp(-idle / SHARE_SECONDS)

    def cost(self) -> StepCost:
        """Of the next step; samples 0: a guess."""
        return self.fit.cost

    def outlook(self) -> StepCost:
        """Of the steps of the next seconds."""
        return self.fit.outlook
