"""What single requests take beside their steps: a step that lasted longer than its cost says is no part of it.

Pure: traced steps, measured and simulated latencies in, seconds out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.step_cost import StepCost, StepLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """Seconds on the clock of the workers' host. `prompts`: it computed tokens of prompts."""

    began: float
    seconds: float
    load: StepLoad
    prompts: bool

    @property
    def ended(self) -> float:
        return self.began + self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSteps:
    """The steps of one worker, and what they take by the cost that it is simulated with."""

    steps: Sequence[TracedStep]
    cost: StepCost

    def excess(self, began: float, ended: float, *, prompts: bool) -> Iterable[float]:
        """Of each step of a kind that ran between these times: the seconds that it lasted beyond its cost."""
        for step in self.steps:
            if step.prompts is prompts and began <= step.began and step.ended <= ended:
                yield step.seconds - self.cost.seconds(step.load)


def beside_steps(
    lone: Sequence[Mapping[str, Any]], latency: str, workers: Sequence[TracedSteps], simulated_ms: float
) -> tuple[float, int]:
    """Milliseconds that single requests take beyond what is simulated of them, in the median, their steps aside; and
    how many of them had steps that were traced: where none had, nothing is taken off.

    `latency` is `ttft`, in which steps with prompts run, or `tpot`, of texts of two tokens: a step without. `lone` are
    rows of a trace, with the `span` in which a request was under way; nothing else was meanwhile.
    """
    prompts = latency == "ttft"
    plain, traced = [], []
    for row in lone:
        measured, (began, ended) = row[f"{latency}_ms"], row["span"]
        plain.append(measured)
        excess = [seconds for worker in workers for seconds in worker.excess(began, ended, prompts=prompts)]
        if excess:
            traced.append(measured - 1e3 * sum(excess))
    return max(0.0, statistics.median(traced or plain) - simulated_ms), len(traced)
