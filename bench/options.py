"""The flags of `millrace bench` and what they mean, checked and frozen.

It parses and validates; it opens no connection and reads no file but those the user named.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from bench.endpoint import Target
from bench.goodput import SearchLimits
from bench.lengths import read_pairs
from bench.replay import read_trace
from bench.summary import SloTargets
from bench.workload import Workload

DEFAULT_URL = "http://127.0.0.1:8000"
OPEN_LOOP_SECONDS = 40.0  # of arrivals, when the number of requests is not given
FEWEST_CLOSED_REQUESTS = 8
FEWEST_OPEN_REQUESTS = 20
PLOT_ENDINGS = (".html", ".svg")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One load: so many requests at a time, or a rate, or neither: a trace at its own times."""

    concurrency: int | None = None
    rate: float | None = None  # requests per second

    @property
    def load(self) -> float:
        """Where it stands on a plot's axis."""
        return float(self.concurrency or self.rate or 0.0)

    def describe(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "at its own times" if self.rate is None else f"{self.rate:.4g} req/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """Everything one run of the benchmark was asked for."""

    targets: tuple[Target, ...]
    baseline: str  # name of the target the others are compared with
    workload: Workload = field(default_factory=Workload)
    points: tuple[Point, ...] = (Point(concurrency=1),)
    search: SearchLimits | None = None  # look for the goodput instead of measuring points
    slo: SloTargets = field(default_factory=SloTargets)
    num_requests: int | None = None
    seconds: float = OPEN_LOOP_SECONDS
    warmups: int = 1
    repeat: int = 1
    seed: int = 0
    model: str | None = None
    chat: bool = False
    prompt_form: str = "auto"
    tokenizer: Path | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    wait_ready: float = 0.0  # seconds
    timeout: float = 600.0  # seconds a request may take
    json_file: Path | None = None
    details: bool = False
    plot_file: Path | None = None

    def __post_init__(self) -> None:
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ValueError("two servers have the same name; write --url NAME=URL")
        if self.baseline not in names:
            raise ValueError(f"--baseline {self.baseline} is none of the servers: {', '.join(names)}")
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError("--num-requests must be at least 1")
        if self.warmups < 0 or self.repeat < 1 or self.seed < 0:
            raise ValueError("--repeat must be at least 1, --warmups and --seed not negative")
        if self.seconds <= 0 or self.timeout <= 0:
            raise ValueError("--duration and --timeout must be positive")
        if self.search is not None and not self.slo.given:
            raise ValueError("--find-goodput needs an objective: --ttft-slo-ms, --tpot-slo-ms or both")
        if self.chat and self.prompt_form == "ids":
            raise ValueError("chat takes text only; leave out --prompt-form ids or --endpoint chat")
        if self.plot_file is not None and self.plot_file.suffix not in PLOT_ENDINGS:
            raise ValueError(f"--plot {self.plot_file}: the name must end in {' or '.join(PLOT_ENDINGS)}")

    def count(self, point: Point) -> int:
        """How many requests a measurement of this point sends."""
        if self.num_requests is not None:
            return self.num_requests
        if point.concurrency is not None:
            return max(FEWEST_CLOSED_REQUESTS, 4 * point.concurrency)
        if point.rate is None:
            return len(self.workload.trace)
        return max(FEWEST_OPEN_REQUESTS, math.ceil(point.rate * self.seconds))


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags by which `millrace bench` measures servers."""
    _add_server_flags(parser)
    _add_load_flags(parser)
    _add_workload_flags(parser)
    _add_goal_and_output_flags(parser)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("servers").add_argument
    add("--url", action="append", metavar="[NAME=]URL", help=f"a server; several are measured in turn ({DEFAULT_URL})")
    add("--baseline", metavar="NAME", help="the server that ratios are against (the first)")
    add("--model", help="model name in requests (the first of /v1/models)")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="(completions)")
    add("--api-key", help="sent as a bearer token")
    add("--header", action="append", default=[], metavar="NAME:VALUE", help="one more request header")
    add("--extra-body", default="{}", metavar="JSON", help="more request fields; null takes one out")
    add("--wait-ready", type=float, default=0.0, metavar="S", help="wait so long for each server to be ready (0)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds a request may take (600)")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", metavar="N[,N…]", help="closed loop: so many requests at a time (1)")
    add("--rate", "--rates", metavar="R[,R…]", help="open loop: Poisson arrivals at so many requests per second")
    add("--find-goodput", action="store_true", help="search the highest rate that meets the objectives")
    add("--num-requests", type=int, metavar="N", help="requests a measurement (4 a sender, or --duration of arrivals)")
    add("--duration", type=float, default=OPEN_LOOP_SECONDS, metavar="S", help="seconds of arrivals (40)")
    add("--warmups", type=int, default=1, metavar="N", help="requests sent first and not counted (1)")
    add("--repeat", type=int, default=1, metavar="N", help="rounds over all servers; medians are shown (1)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and arrivals (0)")


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--workload", choices=("fixed", "sharegpt", "shared-prefix", "trace"), help="(fixed)")
    add("--input-len", type=int, default=256, metavar="N", help="prompt tokens (256)")
    add("--output-len", type=int, default=128, metavar="N", help="output tokens (128)")
    add("--lengths", type=Path, metavar="FILE", help="JSON list of [prompt, output] tokens for sharegpt")
    add("--prefix-share", type=float, default=0.5, metavar="X", help="share of a prompt that others have too (0.5)")
    add("--prefix-groups", type=int, default=1, metavar="N", help="different shared prefixes (1)")
    add("--trace", type=Path, metavar="FILE", help="JSONL of {arrival_s, prompt_tokens or prompt, output_tokens}")
    add("--prompt-form", choices=("auto", "ids", "text"), default="auto", help="how prompts are sent (auto)")
    add("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or its folder (asked of the server)")
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let answers end where the model ends them")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")


def _add_goal_and_output_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("objectives").add_argument
    add("--ttft-slo-ms", type=float, metavar="MS", help="a good request's first token comes within this")
    add("--tpot-slo-ms", type=float, metavar="MS", help="and each later one, on average, within this")
    add("--attainment", type=float, default=0.9, metavar="X", help="share that must be good for --find-goodput (0.9)")
    add("--rate-tolerance", type=float, default=0.05, metavar="X", help="how fine --find-goodput searches (0.05)")
    add("--confirm", type=int, default=0, metavar="N", help="measure the rate found N more times (0)")
    add = parser.add_argument_group("output").add_argument
    add("--json", dest="json_file", type=Path, metavar="FILE", help="all figures as JSON")
    add("--details", action="store_true", help="with --json: every request too")
    add("--plot", dest="plot_file", type=Path, metavar="FILE", help="a page with plots, .html or .svg")


def parse_options(args: argparse.Namespace) -> BenchOptions:
    """The options that parsed flags mean; raises ValueError naming the flag at fault."""
    targets = _targets(args.url or [DEFAULT_URL])
    named = [target.name for target in targets if args.baseline in (target.name, target.url)]
    workload = _workload(args)
    points = _points(args, workload)
    search = None
    if args.find_goodput:
        goal = {"attainment": args.attainment, "tolerance": args.rate_tolerance, "confirmations": args.confirm}
        search = SearchLimits(start=points[0].rate or 1.0, **goal)
    told = {
        "targets": targets,
        "baseline": named[0] if named else args.baseline or targets[0].name,
        "workload": workload,
        "points": points,
        "search": search,
        "slo": SloTargets(ttft_ms=args.ttft_slo_ms, tpot_ms=args.tpot_slo_ms, attainment=args.attainment),
        "seconds": args.duration,
        "chat": args.endpoint == "chat",
        "extra_body": _extra_body(args.extra_body),
        "headers": _headers(args.header, args.api_key),
    }
    return BenchOptions(**_fields_of(BenchOptions, args) | told)


def _fields_of(kind: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The flags that are fields of this dataclass, as they were given."""
    return {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}


def _targets(urls: list[str]) -> tuple[Target, ...]:
    targets = []
    for text in urls:
        name, equals, url = text.partition("=")
        if not equals or "/" in name or "?" in name:  # an `=` inside the address itself
            name, url = "", text
        shown = url.removeprefix("http://").removeprefix("https://").rstrip("/").removesuffix("/v1")
        targets.append(Target(name=name or shown, url=url))
    return tuple(targets)


def _workload(args: argparse.Namespace) -> Workload:
    kind = args.workload or ("trace" if args.trace else "sharegpt" if args.lengths else "fixed")
    if args.trace and kind != "trace":
        raise ValueError(f"--trace goes with --workload trace, not {kind}")
    if args.lengths and kind != "sharegpt":
        raise ValueError(f"--lengths goes with --workload sharegpt, not {kind}")
    pairs = tuple(read_pairs(args.lengths)) if args.lengths else ()
    trace = read_trace(args.trace) if args.trace else ()
    return Workload(**_fields_of(Workload, args) | {"kind": kind, "pairs": pairs, "trace": trace})


def _points(args: argparse.Namespace, workload: Workload) -> tuple[Point, ...]:
    if args.concurrency and (args.rate or args.find_goodput):
        raise ValueError("--concurrency is a closed loop; leave it out with --rate and --find-goodput")
    if args.concurrency:
        return tuple(Point(concurrency=int(value)) for value in _numbers("--concurrency", args.concurrency, whole=True))
    if args.rate:
        return tuple(Point(rate=value) for value in _numbers("--rate", args.rate))
    return (Point() if workload.kind == "trace" else Point(concurrency=1),)


def _numbers(flag: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{flag} {text}: expected numbers with commas between them") from error
    if any(value <= 0 or not math.isfinite(value) or (whole and value != int(value)) for value in values):
        raise ValueError(f"{flag} {text}: expected positive {'whole ' if whole else ''}numbers")
    return values


def _headers(pairs: list[str], api_key: str | None) -> dict[str, str]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"--header {pair}: write it as NAME:VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _extra_body(text: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--extra-body: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("--extra-body must be a JSON object")
    return fields
