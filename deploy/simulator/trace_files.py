"""Reads requests from files: when each arrived, how long prompt and output were, and what was measured of it.

JSONL with an object a line, or CSV with a line of names. It knows nothing of clusters.
"""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from deploy.simulator.texts import VOCABULARY
from deploy.simulator.traffic import Arrival
from serving.messages import Request, SamplingParams, Slo
from serving.service_class import SERVICE_CLASSES, STANDARD

NUMBERS = ("ttft_ms", "tpot_ms", "ttft_slo_ms", "tpot_slo_ms")  # may be missing, as may all that is here
MOST_TOKENS = 1 << 24
LEAST_SPAN = 1e-6  # seconds; arrivals nearer to each other come at once


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRequest:
    """`arrival_s` in seconds on the trace's clock; `ttft_ms` and `tpot_ms` are NaN where they were not measured.

    Objectives are NaN where the request brought none. Prompts of one `prefix` have their first `prefix_tokens` tokens
    in common. One that is not `counted` is served and left out of every figure, as those that warm a cache.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float = math.nan
    tpot_ms: float = math.nan
    ttft_slo_ms: float = math.nan
    tpot_slo_ms: float = math.nan
    service_class: str = STANDARD
    prefix: str = ""
    prefix_tokens: int = 0
    counted: bool = True

    def slo(self, otherwise: Slo) -> Slo:
        """Its own objectives, and the others where it has none."""
        return Slo(
            ttft_ms=otherwise.ttft_ms if math.isnan(self.ttft_slo_ms) else self.ttft_slo_ms,
            tpot_ms=otherwise.tpot_ms if math.isnan(self.tpot_slo_ms) else self.tpot_slo_ms,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFile:
    """A trace that stays in its file: to go through it is to read that anew, line by line, in the order of arrival.

    Its requests come from `first_s` to `last_s` on its clock, with so many tokens in all, and some are not `counted`. A
    file whose lines are not `ordered` by arrival is read as a whole each time.
    """

    path: Path
    requests: int
    counted: int
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    ordered: bool

    @staticmethod
    def checked(path: Path) -> TraceFile:
        """Read once, and nothing of it kept. Raises ValueError that names file, line and field; OSError."""
        requests = counted = prompt = output = 0
        first, last, before, ordered = math.inf, 0.0, 0.0, True
        for each in _requests(path):
            at = each.arrival_s
            requests, counted = requests + 1, counted + each.counted
            prompt, output = prompt + each.prompt_tokens, output + each.output_tokens
            first, last, ordered, before = min(first, at), max(last, at), ordered and before <= at, at
        if not counted:
            raise ValueError(f"{path}: no request in it" + (" is counted" if requests else ""))
        return TraceFile(
            path=path,
            requests=requests,
            counted=counted,
            first_s=first,
            last_s=last,
            prompt_tokens=prompt,
            output_tokens=output,
            ordered=ordered,
        )

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[TracedRequest]:
        if self.ordered:
            return _requests(self.path)
        return iter(sorted(_requests(self.path), key=lambda each: each.arrival_s))


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests in the order they arrived. Raises ValueError that names file, line and field; OSError."""
    return list(TraceFile.checked(path))


def _requests(path: Path) -> Iterator[TracedRequest]:
    """Line by line, as they stand there."""
    with path.open(encoding="utf-8-sig") as lines:
        rows = _csv_rows(path, lines) if path.suffix.lower() == ".csv" else _json_rows(path, lines)
        try:
            for where, row in rows:
                yield _request(where, row)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from None


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    reader = csv.DictReader(lines)
    try:
        for name in ("arrival_s", "prompt_tokens", "output_tokens"):
            if name not in (reader.fieldnames or ()):
                raise ValueError(f"{path}, line 1: there is no column {name}")
        for row in reader:
            if None in row:
                raise ValueError(f"{path}, line {reader.line_num}: more fields than line 1 has names")
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from None


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not an object")
        yield where, row


def _request(where: str, row: Mapping[str, object]) -> TracedRequest:
    given = {name: value for name, value in row.items() if value not in (None, "")}
    arrival = _number(where, "arrival_s", row.get("arrival_s"))
    prompt = _count(where, "prompt_tokens", row.get("prompt_tokens"))
    prefix = _count(where, "prefix_tokens", given["prefix_tokens"]) if given.get("prefix_tokens") else 0
    if prefix > prompt:
        raise ValueError(f"{where}, prefix_tokens: {prefix} are more than the prompt's {prompt}")
    name = str(given.get("service_class", STANDARD))
    if name not in SERVICE_CLASSES:
        raise ValueError(f"{where}, service_class: there are {', '.join(SERVICE_CLASSES)}, not {name!r}")
    return TracedRequest(
        arrival_s=arrival,
        prompt_tokens=prompt,
        output_tokens=_count(where, "output_tokens", row.get("output_tokens")),
        service_class=name,
        prefix=str(given.get("prefix", "")),
        prefix_tokens=prefix,
        counted=_truth(where, "counted", given.get("counted", True)),
        **{field: _number(where, field, given[field]) for field in NUMBERS if field in given},
    )


def _truth(where: str, name: str, value: object) -> bool:
    told = str(value).lower()
    if told not in ("true", "false"):
        raise ValueError(f"{where}, {name}: {value!r} is neither true nor false")
    return told == "true"


def _number(where: str, name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{where}, {name}: {value!r} is not a number from 0 on")
    return number


def _count(where: str, name: str, value: object) -> int:
    number = _number(where, name, value)
    if number != int(number) or not 1 <= number <= MOST_TOKENS:
        raise ValueError(f"{where}, {name}: {value!r} is not a whole number from 1 to {MOST_TOKENS}")
    return int(number)


Traced = Sequence[TracedRequest] | TraceFile
"""A trace's requests, in the order they arrived."""


def natural_rate(traced: Traced) -> float:
    """Requests a second at which they arrived, from the first to the last; 1 where all came at once."""
    first, last = _ends(traced)
    return (len(traced) - 1) / (last - first) if last - first >= LEAST_SPAN else 1.0


def _ends(traced: Traced) -> tuple[float, float]:
    """When the first and the last arrived."""
    if isinstance(traced, TraceFile):
        return traced.first_s, traced.last_s
    return traced[0].arrival_s, traced[-1].arrival_s


def as_arrivals(traced: Traced, slo: Slo, seed: int = 0) -> tuple[Arrival, ...]:
    """All of `made_up` at once."""
    return tuple(made_up(traced, slo, seed))


def made_up(traced: Traced, slo: Slo, seed: int = 0) -> Iterator[Arrival]:
    """The same at one request a second, with made-up texts of these lengths: `natural_rate` restores their times.

    `slo` is for those without objectives of their own.
    """
    generator, rate, (first, _) = np.random.default_rng((seed, 0x5446)), natural_rate(traced), _ends(traced)
    for number, each in enumerate(traced):
        own = generator.integers(1, VOCABULARY, size=each.prompt_tokens - each.prefix_tokens)
        request = Request(
            request_id=f"trace-{number}",
            prompt=(*_prefix(each, seed), *own.tolist()),
            sampling=SamplingParams(max_tokens=each.output_tokens, seed=number, temperature=0.0),
            slo=each.slo(slo),
            service_class=each.service_class,
            priority=SERVICE_CLASSES[each.service_class].priority,
        )
        yield Arrival((each.arrival_s - first) * rate, request, each.output_tokens, each.counted)


def _prefix(traced: TracedRequest, seed: int) -> list[int]:
    """The beginning of all texts of one name: the same tokens, as many as are asked for."""
    if not traced.prefix_tokens:
        return []
    generator = np.random.default_rng((seed, 0x5458, zlib.crc32(traced.prefix.encode())))
    return generator.integers(1, VOCABULARY, size=traced.prefix_tokens).tolist()  # type: ignore[no-any-return]
