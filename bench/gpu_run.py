"""Runs steps of `bench.gpu` one after another, each a child process with a limit, and keeps what came of each.

A step that fails or exceeds its limit is recorded, and the next one runs, as long as its stage has time. Records lie in
a file by commit, device and step, written after each: what has passed is not run again. What steps measure is not known
here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_stages import STAGE_SECONDS, GpuStep, PlanPlaces
from bench.own_server import ROOT, descendants, resident

PASSED, FAILED, TIMED_OUT, INTERRUPTED, SKIPPED = "passed", "failed", "timed out", "interrupted", "skipped"
TAIL_LINES = 15
LEAST_SECONDS = 20.0  # for which a step is begun
GRACE = 10.0  # seconds to end in, once a step has been interrupted
KILLED_SECONDS = 10.0  # that the kernel may take to end a process that is killed

Sample = Callable[[], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """What came of a step. `watched` are the highest and lowest values that samples had, by name."""

    status: str
    seconds: float = 0.0
    command: str = ""
    why: str = ""
    tail: str = ""  # the last lines it printed
    figures: dict[str, Any] = field(default_factory=dict)
    watched: dict[str, list[float]] = field(default_factory=dict)


class RecordFile:
    """Records of one commit on one device, in a file that may have those of others."""

    def __init__(self, path: Path, revision: str, device: str):
        self.path = path
        self._prefix = f"{revision}|{device}|"
        self._all: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def get(self, name: str) -> GpuRecord | None:
        found = self._all.get(self._prefix + name)
        return None if found is None else GpuRecord(**found)

    def put(self, name: str, record: GpuRecord) -> None:
        """On disk when this returns, whole: a reader never sees half of it."""
        self._all[self._prefix + name] = asdict(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(self._all, indent=1) + "\n")
        beside.replace(self.path)

    def done(self, step: GpuStep) -> bool:
        """True if it has passed, and what it made is still there."""
        record = self.get(step.name)
        made = step.makes is None or step.makes.is_dir()
        return record is not None and record.status == PASSED and made


def argv(step: GpuStep, places: PlanPlaces) -> list[str]:
    """The command line of a step, with the file that it writes figures to."""
    module, *rest = step.command
    told = ["--json", str(places.json(step.name))] if step.json else []
    return [*shlex.split(step.program), sys.executable, "-m", module, *told, *rest]


def shown(command: Sequence[str]) -> str:
    """As it is typed in the checkout."""
    return shlex.join("python" if word == sys.executable else word.removeprefix(f"{ROOT}/") for word in command)


def family_memory(pid: int) -> dict[str, float]:
    """Resident MiB of a process and those below it."""
    return {"host_mib": sum(resident(one) for one in descendants(pid)) / 2**20}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunner:
    """Starts, watches and ends the steps; `show` is told lines of progress, a `tick` of seconds apart."""

    places: PlanPlaces
    records: RecordFile
    show: Callable[[str], None]
    sample: Sample = dict
    tick: float = 5.0
    grace: float = GRACE
    stage_seconds: float = STAGE_SECONDS
    command_of: Callable[[GpuStep, PlanPlaces], list[str]] = argv

    def run(self, steps: Sequence[GpuStep], *, again: bool = False) -> None:
        """All of them in order. KeyboardInterrupt ends the step that runs, which is recorded, and is raised on."""
        began, spent = time.monotonic(), dict[int, float]()
        for number, step in enumerate(steps, 1):
            at = f"[{number}/{len(steps)}, {time.monotonic() - began:.0f} s] {step.name}"
            if not again and self.records.done(step):
                self.show(f"{at}: passed before")
                continue
            missing = [name for name in step.after if not self._passed(name, steps)]
            limit = min(step.limit, self.stage_seconds - spent.get(step.stage, 0.0))
            if missing:
                record = GpuRecord(status=SKIPPED, why=f"needs {', '.join(missing)}")
            elif limit < min(step.expected, LEAST_SECONDS):
                record = GpuRecord(status=SKIPPED, why=f"stage {step.stage} has no time left; call it again")
            else:
                self.show(f"{at}: {step.what}, about {step.expected:.0f} s, at most {limit:.0f} s")
                record = self._run_step(step, limit, at)
            spent[step.stage] = spent.get(step.stage, 0.0) + record.seconds
            if record.status in (PASSED, FAILED, TIMED_OUT) or not self.records.done(step):  # or what passed is kept
                self.records.put(step.name, record)
            self.show(f"{at}: {record.status} in {record.seconds:.1f} s{f' ({record.why})' if record.why else ''}")
            if record.status == INTERRUPTED:
                raise KeyboardInterrupt

    def _passed(self, name: str, steps: Sequence[GpuStep]) -> bool:
        return all(self.records.done(step) for step in steps if step.name == name)

    def _run_step(self, step: GpuStep, limit: float, at: str) -> GpuRecord:
        self.places.out.mkdir(parents=True, exist_ok=True)
        figures, log = self.places.json(step.name), self.places.out / f"{step.name}.log"
        figures.unlink(missing_ok=True)
        if step.makes is not None:
            shutil.rmtree(step.makes, ignore_errors=True)  # half of it may be there
        command, began = self.command_of(step, self.places), time.monotonic()
        environment = {**os.environ, **step.environment, "PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1"}
        watched: dict[str, list[float]] = {}
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            status, why = self._wait(child, limit, at, watched)
        return GpuRecord(
            status=status,
            seconds=time.monotonic() - began,
            command=shown(command),
            why=why,
            tail="\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]),
            figures=_read(figures),
            watched=watched,
        )

    def _wait(
        self, child: subprocess.Popen[bytes], limit: float, at: str, watched: dict[str, list[float]]
    ) -> tuple[str, str]:
        """Status and why; nothing of the child runs when this returns."""
        began = time.monotonic()
        try:
            while (elapsed := time.monotonic() - began) < limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(min(self.tick, limit - elapsed))
                    return (PASSED, "") if code == 0 else (FAILED, f"exit status {code}")
                for name, value in (self.sample() | family_memory(child.pid)).items():
                    low, high = watched.get(name, (value, value))
                    watched[name] = [min(low, value), max(high, value)]
                self.show(f"{at}: {time.monotonic() - began:.0f}/{limit:.0f} s")
            return TIMED_OUT, f"after {limit:.0f} s"
        except KeyboardInterrupt:
            return INTERRUPTED, ""
        finally:
            end(child, self.grace)


def end(child: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt a child that still runs, and kill it with all below it unless it ends in time."""
    if child.poll() is not None:
        return
    family = descendants(child.pid)
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    killed = [kill(pid) for pid in {*family, *descendants(child.pid)} - {child.pid}]
    child.kill()
    child.wait()
    for descriptor in killed:
        if descriptor is not None:
            select.select([descriptor], [], [], KILLED_SECONDS)
            os.close(descriptor)


def kill(pid: int) -> int | None:
    """Kill a process; a descriptor that can be read once it has ended, None where there is none to wait for."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptor


def _path() -> str:
    """The checkout first, and whatever has been brought along."""
    brought = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{brought}" if brought else str(ROOT)


def _read(path: Path) -> dict[str, Any]:
    """What a step has written; empty where it has written nothing, or was killed while it wrote."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found
