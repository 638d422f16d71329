"""A surge of requests of two classes beyond what the workers can do: who is served, who waits, and how soon it is over.

    python -m bench.overload [--serve-flags '--quantization int8'] [--out PATH]

It measures the capacity in a closed loop, then sends three spans of Poisson arrivals: `interactive` requests with
objectives and `batch` requests without, together below the capacity, then at three times it, then as before. It
starts one server of this checkout, sends to it, and reads its processes' memory meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.connection import TransportError
from bench.contenders import Contender, parse_fleet
from bench.endpoint import ServerError
from bench.load import Pace, Watch, run_load
from bench.misses import PARTS, TimeSpent, counted, time_spent
from bench.mixture import Mixture, RequestKind
from bench.own_server import OwnServer, commit
from bench.plot import Panel, sheet
from bench.progress import say
from bench.report import number
from bench.sitting import BASE_FLAGS, OpenServer, open_server, settle
from bench.standings import table
from bench.summary import SloTargets
from bench.surge import (
    WINDOW,
    Arrived,
    LoadSpan,
    SpanFigures,
    bounds,
    figures,
    recovery_seconds,
    timed_in_spans,
    windows,
)

CLOSED_LOOP = 24  # requests at a time that the capacity is measured with
LOOK_SECONDS = 0.5  # between readings of memory
BEFORE, SURGE, AFTER = "before", "surge", "after"
INTERACTIVE = RequestKind(
    name="interactive",
    prompt_tokens=256,
    output_tokens=64,
    spread=0.3,
    service_class="interactive",
    slo=SloTargets(ttft_ms=1000.0, tpot_ms=60.0),
)
BATCH = RequestKind(name="batch", prompt_tokens=256, output_tokens=64, spread=0.3, service_class="batch")
KINDS = (INTERACTIVE, BATCH)


@dataclass(kw_only=True, slots=True)
class Observed:
    """All seeds together. Memory is in bytes by second of the run: the sum of all processes' resident pages.

    `spent` tells where the time of every interactive request went.
    """

    arrived: list[Arrived]
    spent: list[TimeSpent]
    memory: list[list[tuple[float, int]]]


async def capacity(server: OpenServer, seconds: float) -> float:
    """Requests a second that are answered, of both kinds equally, with CLOSED_LOOP of them in flight."""
    plain = [replace(kind, slo=SloTargets(), service_class="batch") for kind in KINDS]
    timed = Mixture(name="capacity", kinds=tuple(plain)).timed(1.0, 40 + int(40 * seconds), seed=99)
    prepared, over = server.prepare(timed), asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    run = await run_load(server.endpoint, prepared, Pace(concurrency=CLOSED_LOOP), Watch(interrupted=over))
    await settle(server)
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    if not good:
        raise ServerError(f"{server.endpoint.target.url} answered nothing: {run.outcomes[:1]}")
    return len(good) / run.duration


async def surge(server: OpenServer, spans: Sequence[LoadSpan], seeds: int) -> Observed:
    """The spans, once for each seed, until all is answered or refused."""
    observed = Observed(arrived=[], spent=[], memory=[])
    assert server.own is not None
    for seed in range(seeds):
        timed = timed_in_spans(KINDS, spans, seed=seed)
        prepared, arrivals = server.prepare(timed), tuple(one.at for one in timed)
        gc.collect()
        began = server.endpoint.client.clock()
        memory: list[tuple[float, int]] = []
        looking = asyncio.create_task(_look(server.own, memory))
        try:
            run = await run_load(server.endpoint, prepared, Pace(arrivals=arrivals), Watch())
            await asyncio.sleep(2 * LOOK_SECONDS)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        observed.arrived += [Arrived(outcome.scheduled - began, outcome) for outcome in run.outcomes]
        observed.memory.append(memory)
        for one in observed.arrived[-len(run.outcomes) :]:
            if one.outcome.kind == INTERACTIVE.name:
                observed.spent.append(time_spent(one.outcome, await _explanation(server, one.outcome.id), one.at))
        await settle(server)
        good = sum(outcome.error is None for outcome in run.outcomes)
        say(f"seed {seed}: {good} of {len(run.outcomes)} answered in {run.duration:.0f} s")
    return observed


async def _explanation(server: OpenServer, name: str) -> dict[str, Any] | None:
    """What the server tells of a request; None where it knows nothing of it. Raises ServerError."""
    if not name:
        return None
    try:
        answer = await server.endpoint.client.get(f"/v1/requests/{name}/explain")
    except TransportError as error:
        raise ServerError(f"{server.endpoint.target.url}: {error}") from error
    return orjson.loads(answer.body) if answer.status == 200 else None


async def _look(own: OwnServer, memory: list[tuple[float, int]]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        held = await asyncio.to_thread(own.resident_bytes)
        memory.append((loop.time() - began, sum(held.values())))
        await asyncio.sleep(LOOK_SECONDS)


def verdict(observed: Observed, spans: Sequence[LoadSpan]) -> dict[str, float | None]:
    """The figures that the overload is about. Shares of requests offered, seconds, and ratios of bytes."""
    found = {(one.kind, one.span): one for one in figures(observed.arrived, KINDS, spans)}
    before, during = (found[INTERACTIVE.name, span].attainment for span in (BEFORE, SURGE))
    (_, _, surge_at), (_, _, surge_end), (_, _, last) = bounds(spans)
    batch = found[BATCH.name, SURGE]
    start, peak, end = _memory(observed, surge_at)
    return {
        "interactive_before": before,
        "interactive_during": during,
        "interactive_kept": during / before if before else None,
        "batch_unanswered": 1 - batch.completed / batch.offered if batch.offered else None,
        "recovery_seconds": recovery_seconds(observed.arrived, INTERACTIVE, surge_end, last, before),
        "memory_before": start,
        "memory_peak": peak,
        "memory_end": end,
    }


def _memory(observed: Observed, surge_at: float) -> tuple[float, float, float]:
    """Median over seeds of bytes just before the surge, at most, and at the end."""
    starts = [next((held for at, held in reversed(one) if at <= surge_at), 0) for one in observed.memory if one]
    peaks = [max(held for _, held in one) for one in observed.memory if one]
    ends = [one[-1][1] for one in observed.memory if one]
    start, peak, end = (statistics.median(values) if values else 0.0 for values in (starts, peaks, ends))
    return start, peak, end


def markdown(observed: Observed, spans: Sequence[LoadSpan], capable: float, title: str) -> str:
    """Three tables: what became of each kind in each span, the verdict, and where interactive requests' time went."""
    rows = [_row(one, spans) for one in figures(observed.arrived, KINDS, spans)]
    heads = ["class", "span", "offered/s", "offered", "answered", "refused", "failed", "attained", "TTFT p50 / p99, ms"]
    first = table([*heads, "TPOT p50, ms"], rows)
    second = table(
        ["figure", "value"], [[name, _shown(name, value)] for name, value in verdict(observed, spans).items()]
    )
    rates = "; ".join(
        f"{span.name} {span.seconds:g} s at " + " + ".join(f"{rate:.2f}" for rate in span.rates.values())
        for span in spans
    )
    about = (
        f"{title} Capacity in a closed loop of {CLOSED_LOOP}: {capable:.2f} req/s. Interactive and batch: {rates}."
        f" Recovery: seconds after the surge from which on each {WINDOW:g} s of arrivals attain 90 % of `before`."
    )
    heads = ["span", "missed by", *(f"{part}, ms" for part in PARTS)]
    third = table(heads, [_spent_row(observed.spent, *where) for where in bounds(spans)])
    told = "Parts of the TTFT of interactive requests that were answered, median / p99; and why others missed."
    return "\n\n".join([about, first, second, told, third]) + "\n"


def _spent_row(spent: Sequence[TimeSpent], span: LoadSpan, first: float, last: float) -> list[str]:
    own = [one for one in spent if first <= one.at < last]
    why = ", ".join(f"{reason}: {count}" for reason, count in counted(own, INTERACTIVE.slo).items())
    cells = []
    for part in PARTS:
        values = sorted(1e3 * one.parts[part] for one in own if part in one.parts)
        cells.append(f"{values[len(values) // 2]:.0f} / {values[int(0.99 * len(values))]:.0f}" if values else "—")
    return [span.name, why or "—", *cells]


def _row(one: SpanFigures, spans: Sequence[LoadSpan]) -> list[str]:
    span = next(span for span in spans if span.name == one.span)
    ttft, tpot = sorted(one.ttft), sorted(one.tpot)
    spread = f"{1e3 * ttft[len(ttft) // 2]:.0f} / {1e3 * ttft[int(0.99 * len(ttft))]:.0f}" if ttft else "—"
    counts = [str(count) for count in (one.offered, one.completed, one.refused, one.failed)]
    attained = f"{one.attainment:.1%}" if one.kind == INTERACTIVE.name else ""
    token = f"{1e3 * tpot[len(tpot) // 2]:.1f}" if tpot else "—"
    return [one.kind, one.span, f"{span.rates[one.kind]:.2f}", *counts, attained, spread, token]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "—"
    if name.startswith("memory"):
        return f"{value / (1 << 20):,.0f} MiB"
    return f"{number(value)} s" if name.endswith("seconds") else f"{value:.1%}"


def drawing(observed: Observed, spans: Sequence[LoadSpan], title: str) -> str:
    """Attainment, answers a second and memory over time, as SVG."""
    changes = [last for _, _, last in bounds(spans)[:-1]]
    last = bounds(spans)[-1][2]
    attained = [
        (at + WINDOW / 2, 100 * share) for at, share in windows(observed.arrived, INTERACTIVE, 0.0, last, step=2)
    ]
    memory = [(at, held / (1 << 20)) for at, held in (observed.memory[-1] if observed.memory else [])]
    seeds = max(1, len(observed.memory))
    ends = {
        "interactive": _rate(observed, INTERACTIVE.name, seeds, answered=True),
        "batch": _rate(observed, BATCH.name, seeds, answered=True),
        "refused": _rate(observed, None, seeds, answered=False),
    }
    drawn: list[tuple[str, Mapping[str, list[tuple[float, float]]], float | None]] = [
        ("interactive requests within both objectives, %", {"interactive": attained}, 90.0),
        ("answered or refused, requests a second", ends, None),
        ("resident memory of all processes, MiB", {"memory": memory}, None),
    ]
    panels = [
        Panel(title=name, x_label="seconds", curves=curves, limit=limit, changes=changes)
        for name, curves, limit in drawn
    ]
    return sheet(title, panels, ["interactive", "batch", "refused", "memory"])


def _rate(observed: Observed, kind: str | None, seeds: int, *, answered: bool) -> list[tuple[float, float]]:
    """Requests a second that ended in each 2 s, of the runs on average; those refused where not `answered`."""
    counts: dict[int, int] = {}
    for one in observed.arrived:
        outcome = one.outcome
        if outcome.finished is None or (outcome.error is None) != answered or kind not in (None, outcome.kind):
            continue
        slot = int((one.at + outcome.finished - outcome.scheduled) // 2)
        counts[slot] = counts.get(slot, 0) + 1
    last = max(counts, default=-1)
    return [(2.0 * slot + 1, counts.get(slot, 0) / 2 / seeds) for slot in range(last + 1)]


def spans_of(args: argparse.Namespace, capable: float) -> list[LoadSpan]:
    """Raises ValueError that names the flag."""
    for name in ("before", "surge", "after", "seeds", "capacity", "warm_up"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    shares = {name: shares_of(name, getattr(args, name)) for name in ("interactive", "batch")}
    seconds = (args.before, args.surge, args.after)
    return [
        LoadSpan(name=name, seconds=length, rates={kind: capable * values[number_] for kind, values in shares.items()})
        for number_, (name, length) in enumerate(zip((BEFORE, SURGE, AFTER), seconds, strict=True))
    ]


def shares_of(name: str, text: str) -> list[float]:
    """`0.2,2.4,0.2` → the three of them. Raises ValueError."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < math.inf for share in shares):
        raise ValueError(f"--{name} {text}: give three shares of the capacity, before the surge, in it and after it")
    return shares


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--fleet", default="mixed=2", metavar="mixed=2", help="workers (mixed=2)")
    add("--policy", default="goodput", help="routing policy (goodput)")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of the server")
    add("--interactive", default="0.3,0.6,0.3", metavar="X,X,X", help="rates before, in the surge and after it")
    add("--batch", default="0.2,2.4,0.2", metavar="X,X,X", help="likewise, as shares of the capacity")
    add("--before", type=float, default=30.0, metavar="S", help="seconds (30)")
    add("--surge", type=float, default=30.0, metavar="S", help="seconds (30)")
    add("--after", type=float, default=40.0, metavar="S", help="seconds (40)")
    add("--seeds", type=int, default=3, metavar="N", help="runs, taken together (3)")
    add("--capacity", type=float, metavar="R", help="req/s, instead of measuring it")
    add("--warm-up", type=float, default=15.0, metavar="S", help="seconds of the closed loop (15)")
    add("--out", type=Path, default=Path("bench-overload"), metavar="PATH", help="beginning of files (bench-overload)")
    return parser


async def overload(args: argparse.Namespace) -> None:
    """Measures and writes. Raises ServerError, ValueError."""
    _, fleet = parse_fleet(args.fleet)
    contender = Contender(name="overload", flags=(*fleet, "--routing-policy", args.policy))
    base = [*BASE_FLAGS, *shlex.split(args.serve_flags)]
    spans_of(args, 1.0)
    async with AsyncExitStack() as stack:
        server = await open_server(
            contender, Mixture(name="overload", kinds=KINDS), stack, base=base, folder=args.out.parent
        )
        measured = await capacity(server, args.warm_up)
        capable = args.capacity or measured
        spans = spans_of(args, capable)
        say(f"capacity {capable:.2f} req/s; the surge asks for {sum(spans[1].rates.values()):.2f}")
        observed = await surge(server, spans, args.seeds)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    title = f"{started}, commit {commit()}. {shlex.join(contender.flags)} {args.serve_flags}."
    text = markdown(observed, spans, capable, title)
    args.out.with_suffix(".md").write_text(text)
    args.out.with_suffix(".svg").write_text(drawing(observed, spans, "Overload at three times the capacity"))
    told = {
        "title": title,
        "capacity": capable,
        "spans": [asdict(span) for span in spans],
        "figures": [asdict(one) for one in figures(observed.arrived, KINDS, spans)],
        "verdict": verdict(observed, spans),
        "memory": observed.memory,
        "interactive": [asdict(one) for one in observed.spent],
    }
    args.out.with_suffix(".json").write_text(json.dumps(told, indent=1))
    print(text)


def main() -> int:
    try:
        asyncio.run(overload(arguments().parse_args()))
    except (ServerError, ValueError, OSError) as error:
        say(f"bench.overload: {error}")
        return 2
    except KeyboardInterrupt:
        say("bench.overload: interrupted, nothing is written")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
