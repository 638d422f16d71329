"""What a worker knows of its own pace: the fit of its steps' cost, and how much of its time goes to prompts.

Pure: records of steps come in on the engine's thread, questions with their `now` on any other.
"""

from __future__ import annotations

from serving.engine.plan import StepRecord
from serving.engine.step_fit import StepFit
from serving.step_cost import StepCost

SHARE_SECONDS = 10.0  # of steps after which one counts for about a third in `prompt_share`


class StepMeter:
    """`cost` is for schedulers: what steps take, as of the last fit."""

    def __init__(self, fit: StepFit):
        self.fit = fit
        self.prompt_share = 0.0  # of recent step time, in steps that computed prompt tokens

    def stepped(self, record: StepRecord) -> None:
        """A step that computed something has ended."""
        prompts = record.prompt_tokens > 0
        self.fit.observe(record.load, record.cadence_seconds, prompts=prompts)
        weight = min(1.0, record.cadence_seconds / SHARE_SECONDS)
        self.prompt_share += weight * (prompts - self.prompt_share)

    def cost(self) -> StepCost:
        """samples 0: a guess."""
        return self.fit.cost
