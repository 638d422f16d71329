"""Keeps what a worker has learned of its steps' cost over a restart: a small file in the cache folder for each kind.

A kind is what the cost depends on: model and KV layout, kernels, role, threads and CPU. What cannot be read, or is of
another kind, counts for nothing; the worker then begins with a guess.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from serving.background import BackgroundTasks
from serving.cache_folder import cache_folder
from serving.engine.step_meter import StepMeter
from serving.kernels.cpu import default_threads
from serving.messages import Role
from serving.step_cost import StepCost

log = logging.getLogger(__name__)

FORMAT = 1
SAVE_SECONDS = 60.0
MOST_SAMPLES = 1 << 32  # heartbeats have no room for more
WORTH_KEEPING = 64  # steps a cost is fitted to: fewer say less than the guess


@dataclass(frozen=True, slots=True)
class StepCostFile:
    """A file at `path` for workers of `kind`, each of whose values it repeats in clear."""

    path: Path
    kind: Mapping[str, str]

    def read(self) -> StepCost | None:
        """What was kept; None, with a line in the log, where there is something that is no such cost."""
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s cannot be read, step costs begin with a guess: %s", self.path, error)
            return None
        cost = _cost(content, self.kind)
        if cost is None:
            log.warning("%s holds no step cost of this worker's kind, which begins with a guess", self.path)
        return cost

    def write(self, cost: StepCost) -> None:
        """All of it or nothing; where that fails a line in the log says so."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, suffix=".part", delete=False) as part:
                try:
                    json.dump({"format": FORMAT, "kind": dict(self.kind), "cost": asdict(cost)}, part)
                    part.close()
                    Path(part.name).replace(self.path)
                except OSError:
                    Path(part.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            log.warning("the step costs cannot be kept: %s", error)


def _cost(content: object, kind: Mapping[str, str]) -> StepCost | None:
    """None unless it is a cost of this kind, every number of it a possible one."""
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("kind") != dict(kind):
        return None
    found = content.get("cost")
    names = asdict(StepCost(fixed=0.0, token=0.0)).keys()
    if (
        not isinstance(found, dict)
        or found.keys() != names
        or not all(type(each) in (int, float) for each in found.values())
    ):
        return None
    cost = StepCost(**found)
    return cost if type(cost.samples) is int and 0 < cost.samples < MOST_SAMPLES and cost.possible else None


def step_cost_file(fingerprint: str, form: str, role: Role, threads: int | None, device: str) -> StepCostFile:
    """Where workers like this one keep what they learn."""
    kind = {
        "fingerprint": fingerprint,
        "form": form,
        "role": role.value,
        "device": device,
        "threads": str(threads or default_threads()),
        "cpu": cpu_name(),
    }
    digest = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:20]
    return StepCostFile(cache_folder() / f"step-cost-{digest}.json", kind)


def cpu_name() -> str:
    """The processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or platform.machine())} x{os.cpu_count()}"


class StepCostKeeper:
    """A worker's meter of its steps and, where there is one, the file its cost is kept in while it runs."""

    def __init__(self, meter: StepMeter, file: StepCostFile | None = None):
        self.meter = meter
        self.file = file
        self._kept: StepCost | None = None
        self._writing: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()

    def start(self, restarts: Counter[str] | None = None) -> None:
        """Save now and then from now on; `restarts` counts mistakes of our own. Call on a running event loop."""
        if self.file is not None:
            self._background = BackgroundTasks(restarts)
            self._background.start("step-costs", self._save_now_and_then)

    async def _save_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write the cost as of the last fit, if it is new and there is something to it."""
        cost = self.meter.cost()
        if self.file is None or cost == self._kept or self.meter.fit.seen < WORTH_KEEPING or not cost.samples:
            return
        self._writing = asyncio.create_task(self._write(self.file, cost), name="write-step-costs")
        await asyncio.shield(self._writing)  # a thread goes on when its task is cancelled

    async def _write(self, file: StepCostFile, cost: StepCost) -> None:
        await asyncio.to_thread(file.write, cost)
        self._kept = cost

    async def stop(self) -> None:
        """Save a last time; nothing is written afterwards."""
        await self._background.stop()
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self.save()
