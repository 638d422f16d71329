"""How late the steps of paced servers ended, and how busy the machine was: whether a run on it is to be believed.

It reads what scripts.paced writes, and /proc/stat. What runs amount to is not known here. Processes of a lower priority
(`nice -n 19`, best with `chrt --idle 0`) may use what cores are left: how late steps end tells what they cost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

LATE_MOST = 0.03  # of the seconds that steps were to last
BUSY_MOST = 0.75  # of all cores, without processes that are nice: more, and what is around the steps waits for a core
FIELDS = ("steps", "paced", "late", "worst")
BUSY, LATE, WORST = "cpu_busy", "step_lag", "worst_step_lag_ms"  # of a Trial's metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLags:
    """Of steps that were to last `paced` seconds and lasted `late` seconds longer; `worst` is the most of one."""

    steps: int = 0
    paced: float = 0.0
    late: float = 0.0
    worst: float = 0.0

    def __add__(self, other: StepLags) -> StepLags:
        return StepLags(
            steps=self.steps + other.steps,
            paced=self.paced + other.paced,
            late=self.late + other.late,
            worst=max(self.worst, other.worst),
        )

    @property
    def share(self) -> float:
        """Of what steps were to last, how much longer they lasted."""
        return self.late / self.paced if self.paced else 0.0


def lags_between(folder: Path, began: float, ended: float) -> StepLags:
    """Of all workers that wrote to the folder, between two times of time.time(), by what each told of a second."""
    told = (line for file in sorted(folder.glob("*.jsonl")) for line in _lines(file))
    own = (line for line in told if began <= line["at"] <= ended)
    return sum((StepLags(**{name: line[name] for name in FIELDS}) for line in own), StepLags())


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Whole lines: the last one may be half written."""
    content = file.read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        yield orjson.loads(line)


def cpu_seconds(stat: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Busy and all CPU time of the machine since it began, in units of its own; zeros where nobody tells.

    What a process is nice with is not busy, unless this one, and so the servers it starts, are nice themselves.
    """
    try:
        times = [float(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
        _, nice, _, idle, disks, *_ = times
    except (OSError, IndexError, ValueError):
        return 0.0, 0.0
    return sum(times) - idle - disks - (0.0 if os.nice(0) > 0 else nice), sum(times)


class StrainWatch:
    """What the machine did from the moment this was made on, as metrics of a run."""

    def __init__(self, lags: Path):
        self._lags = lags
        self._began, self._cpu = time.time(), cpu_seconds()

    def metrics(self) -> dict[str, float]:
        busy, whole = (now - then for now, then in zip(cpu_seconds(), self._cpu, strict=True))
        found = lags_between(self._lags, self._began, time.time())
        return {BUSY: busy / whole if whole else 0.0, LATE: found.share, WORST: 1e3 * found.worst}


def strain(metrics: Mapping[str, float]) -> str:
    """Why a run with these metrics is not to be believed; empty where it is, or where nothing is known of it."""
    late, busy = metrics.get(LATE, 0.0), metrics.get(BUSY, 0.0)
    if late <= LATE_MOST and busy <= BUSY_MOST:
        return ""
    return f"the machine was overloaded: {busy:.0%} busy, steps {late:.1%} longer than they were to be"
