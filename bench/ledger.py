"""Runs that were measured, a line of JSON each, so that a comparison goes on where it was interrupted.

It reads and appends one file; what the runs mean is read elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialKey:
    """What a run measured: `case` says workload and settings, `contender` is Contender.identity."""

    case: str
    contender: str
    rate: float  # requests a second
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run. `offered` requests were sent or would have been, `met` of the `ended` ones met their objectives.

    `kinds` has [ended, met] by kind of request; `errors` counts by kind of failure. `stopped` early is a run that had
    missed too much already. Times are seconds, `at` since the epoch.
    """

    key: TrialKey
    offered: int
    ended: int
    met: int
    kinds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)  # what was said of one of each kind
    metrics: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    stopped: bool = False
    at: float = 0.0
    commit: str = ""


class Ledger:
    """Trials and notes of one file. A last line that was cut short is dropped. Raises ValueError for other content."""

    def __init__(self, path: Path):
        self.path = path
        self.trials: dict[TrialKey, Trial] = {}
        self.notes: dict[str, Any] = {}
        self._size = 0  # bytes of whole lines
        if path.exists():
            self._read(path.read_bytes())

    def _read(self, content: bytes) -> None:
        self._size = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self._size].splitlines(), 1):
            try:
                self._take(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from error

    def _take(self, told: dict[str, Any]) -> None:
        if "note" in told:
            self.notes[told["note"]] = told["value"]
            return
        trial = Trial(**told | {"key": TrialKey(**told["key"]), "warnings": tuple(told["warnings"])})
        self.trials[trial.key] = trial

    def add(self, trial: Trial) -> None:
        """Keep a run, at once on disk."""
        self.trials[trial.key] = trial
        self._append(asdict(trial))

    def note(self, name: str, value: Any) -> None:
        """Keep a value that a later part of the comparison needs, such as the first rate."""
        self.notes[name] = value
        self._append({"note": name, "value": value})

    def _append(self, told: object) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._size)
            file.write(orjson.dumps(told) + b"\n")
            self._size = file.tell()
