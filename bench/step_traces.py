"""The steps of each run on a server of ours, cut out of the traces that its workers write.

Files in one folder; what the steps are used for is not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.around_steps import TracedStep, TracedSteps
from bench.deployments import ServedWorkers
from serving.step_cost import StepCost, StepLoad

TAKES_STEPS = 32  # fewer say nothing of how steps vary


def logs_of(out: Path) -> Path:
    """The folder beside the files that begin with `out`, where servers log and trace."""
    return out.absolute().with_name(f"{out.name}-logs")


def trace_flags(folder: Path, deployment: ServedWorkers) -> tuple[str, ...]:
    """Of a server whose workers are to trace their steps."""
    return "--profile", str(folder / f"{deployment.name}-steps.json")


def cut_steps(folder: Path, deployment: ServedWorkers, run: str, began: float, ended: float) -> None:
    """Write the steps of a run, by the clock of the workers' host in seconds. Call once its server has ended."""
    for role, file in _files(folder, deployment, run).items():
        trace = _trace(folder, deployment, role)
        if not trace.exists():
            continue
        with trace.open() as lines, file.open("w") as kept:
            for line in lines:
                event = _step(line)
                if event is not None and began <= event["ts"] / 1e6 <= ended:
                    kept.write(line)


def traced_steps(folder: Path, deployment: ServedWorkers, costs: Mapping[str, StepCost]) -> list[TracedSteps]:
    """All steps of each worker so far, beside its cost, which is given by role. Call once its server has ended."""
    found = []
    for role, cost in costs.items():
        trace, steps = _trace(folder, deployment, role), list[TracedStep]()
        if trace.exists():
            with trace.open() as lines:
                steps = [_traced(event) for event in map(_step, lines) if event is not None]
        found.append(TracedSteps(steps=[step for step in steps if step.load.new_tokens], cost=cost))
    return found


def _step(line: str) -> dict[str, Any] | None:
    """The event of a step; None of another, or of half a line."""
    if not line.endswith(",\n") or '"step"' not in line:
        return None
    found: dict[str, Any] = json.loads(line.rstrip(",\n"))
    return found


def _traced(event: Mapping[str, Any]) -> TracedStep:
    told = event["args"]
    load = StepLoad(told["new_tokens"], float(told["pairs"]), told["sequences"], float(told["context_tokens"]))
    began, seconds = event["ts"] / 1e6, event["dur"] / 1e6
    return TracedStep(began=began, seconds=seconds, load=load, prompts=told["prompt_tokens"] > 0)


def steps_of(folder: Path, deployment: ServedWorkers, run: str) -> Mapping[str, Path]:
    """By role, the files of a run that were cut, but for those with hardly a step."""
    files = _files(folder, deployment, run)
    return {role: file for role, file in files.items() if file.exists() and _lines(file) >= TAKES_STEPS}


def _lines(file: Path) -> int:
    with file.open() as lines:
        return sum(1 for _ in lines)


def _trace(folder: Path, deployment: ServedWorkers, role: str) -> Path:
    """Where the worker of a role traces, as trace_flags have it."""
    return folder / f"{deployment.name}-steps.{role}-0.json"


def _files(folder: Path, deployment: ServedWorkers, run: str) -> dict[str, Path]:
    name = re.sub(r"[^a-z0-9.]+", "-", run)
    return {role: folder / f"{name}-{role}-steps.json" for role in deployment.roles}
