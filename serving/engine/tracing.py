"""Writes where a worker's steps spend their time as a Chrome trace, for chrome://tracing or ui.perfetto.dev.

Events go to the file as they happen, so a killed worker leaves what it had; the format lets the array stay open.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from serving.engine.plan import StepRecord


class TraceWriter:
    """One file for one worker. Raises OSError when it cannot be written."""

    def __init__(self, path: Path, worker: str):
        self._file = path.open("w", buffering=1 << 16)
        self._process = os.getpid()
        self._file.write("[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": worker}})

    def step(self, record: StepRecord) -> None:
        """A step as four spans in a row under one: schedule, forward, sample, account."""
        begin = record.began
        counts = {
            "sequences": record.load.sequences,
            "new_tokens": record.load.new_tokens,
            "prompt_tokens": record.prompt_tokens,
            "context_tokens": round(record.load.context_tokens),
            "pairs": round(record.load.pairs),
            "cadence_us": round(record.cadence_seconds * 1e6),
        }
        self.span("step", begin, record.step_seconds, counts)
        for name in ("schedule", "batch", "forward", "sample"):
            seconds = getattr(record, f"{name}_seconds")
            self.span(name, begin, seconds, {})
            begin += seconds
        self.span("account", begin, record.began + record.step_seconds - begin, {})

    def span(self, name: str, begin: float, seconds: float, args: dict[str, int], row: int = 1) -> None:
        """One piece of work, in a row of its own for each `row`; seconds, on any clock."""
        self._write(
            {"name": name, "ph": "X", "ts": begin * 1e6, "dur": max(0.0, seconds) * 1e6, "tid": row, "args": args}
        )

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps({"pid": self._process, **event}) + ",\n")

    def close(self) -> None:
        self._file.close()
