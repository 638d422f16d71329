"""Recorded arrivals to replay: reads the JSONL file, checks every line, and stretches the times to a rate.

Pure but for reading the file; it knows nothing of what answers the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import orjson


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One line of a trace: seconds since its start, lengths, and the prompt itself when it was recorded."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: str | tuple[int, ...] | None = None


def trace_arrivals(trace: Sequence[TraceLine], count: int, rate: float | None) -> list[float]:
    """Arrival times of a trace, repeated end to end when `count` asks for more, stretched to `rate` when given."""
    if count <= 0:
        return []
    start, end = trace[0].arrival_s, trace[-1].arrival_s
    gap = (end - start) / (len(trace) - 1) if len(trace) > 1 else 0.0
    period = end - start + gap
    times = [trace[index % len(trace)].arrival_s - start + index // len(trace) * period for index in range(count)]
    if rate is None:
        return times
    if times[-1] <= 0:
        raise ValueError("a trace whose requests all arrive at once cannot be stretched to a rate")
    stretch = (count - 1) / rate / times[-1]
    return [time * stretch for time in times]


def read_trace(path: Path) -> tuple[TraceLine, ...]:
    """A JSONL file of {arrival_s, output_tokens, and prompt_tokens or prompt}; raises ValueError naming the line."""
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"--trace {path}: {error.strerror}") from error
    lines = [_trace_line(row, f"--trace {path}, line {number}") for number, row in enumerate(rows, 1) if row.strip()]
    return tuple(sorted(lines, key=lambda line: line.arrival_s))


def _trace_line(row: bytes, where: str) -> TraceLine:
    try:
        fields: Any = orjson.loads(row)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: expected an object")
    unknown = fields.keys() - {"arrival_s", "prompt_tokens", "output_tokens", "prompt"}
    if unknown:
        raise ValueError(f"{where}: unknown field `{min(unknown)}`")
    prompt, arrival, output = fields.get("prompt"), fields.get("arrival_s"), fields.get("output_tokens")
    tokens = fields.get("prompt_tokens", len(prompt) if isinstance(prompt, list) else 0)
    if not isinstance(arrival, int | float) or isinstance(arrival, bool) or arrival < 0:
        raise ValueError(f"{where}: `arrival_s` must be a number of seconds, not {arrival!r}")
    if not _positive(output):
        raise ValueError(f"{where}: `output_tokens` must be a positive whole number, not {output!r}")
    if prompt is None and not _positive(tokens):
        raise ValueError(f"{where}: give `prompt_tokens`, a positive whole number, or `prompt`")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    elif prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise ValueError(f"{where}: `prompt` must be a text or a list of token ids, and not empty")
    return TraceLine(arrival_s=float(arrival), prompt_tokens=tokens, output_tokens=output, prompt=prompt)


def _positive(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0
