"""What a step of a worker takes where the worker is a pipeline of stages, from the profile of one that is not.

Pure arithmetic. A stage has its share of the layers and passes on what it computed, which costs as in DistServe's
simulator (simdistserve/estimators/time_estimator.py, Apache-2.0): `pp` ms for each of `pp` stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.simulator.hardware import Roofline
from deploy.simulator.profiles import PIPELINE_MS, STEP_CONTEXT_MS, STEP_MS, PhaseTables, Profile, StepWork


@dataclass(frozen=True, slots=True)
class StageCosts:
    """`free_decode` leaves the cost of passing on out of decode steps, as the reference simulator does."""

    profile: Profile
    stages: int = 1
    free_decode: bool = False

    def seconds(self, work: StepWork) -> tuple[float, float]:
        """Seconds until the first stage may begin the next step, and until the last has ended this one."""
        whole = self.profile.seconds(work)
        if self.stages == 1 and not self.free_decode:
            return whole, whole
        around, passing = self._around(work), PIPELINE_MS / 1e3
        computing = whole - around - (passing if around else 0.0)
        passed = 0.0 if self.free_decode and not work.prompts else self.stages * passing
        stage = computing / self.stages + passed
        return stage + around, self.stages * stage + around

    def _around(self, work: StepWork) -> float:
        """Of the system around the model, before the first stage; fitted costs do not tell it apart."""
        match self.profile.steps:
            case PhaseTables():
                return (STEP_MS + STEP_CONTEXT_MS * (work.prompt_context + work.decoding_context)) / 1e3
            case Roofline(hardware=hardware):
                return max(0.0, hardware.step_seconds - PIPELINE_MS / 1e3)
        return 0.0
