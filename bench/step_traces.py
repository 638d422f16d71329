"""The steps of each run on a server of ours, cut out of the traces that its workers write.

Files in one folder; what the steps are used for is not known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from bench.deployments import ServedWorkers

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
        trace = folder / f"{deployment.name}-steps.{role}-0.json"
        if not trace.exists():
            continue
        with trace.open() as lines, file.open("w") as kept:
            for line in lines:
                if line.endswith(",\n") and '"step"' in line:
                    event = json.loads(line.rstrip(",\n"))
                    if began <= event["ts"] / 1e6 <= ended:
                        kept.write(line)


def steps_of(folder: Path, deployment: ServedWorkers, run: str) -> Mapping[str, Path]:
    """By role, the files of a run that were cut, but for those with hardly a step."""
    files = _files(folder, deployment, run)
    return {role: file for role, file in files.items() if file.exists() and _lines(file) >= TAKES_STEPS}


def _lines(file: Path) -> int:
    with file.open() as lines:
        return sum(1 for _ in lines)


def _files(folder: Path, deployment: ServedWorkers, run: str) -> dict[str, Path]:
    name = re.sub(r"[^a-z0-9.]+", "-", run)
    return {role: folder / f"{name}-{role}-steps.json" for role in deployment.roles}
