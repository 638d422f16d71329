"""TTFT and TPOT as a real fleet's router predicted them, against what they came to, before and after the load changes.

    python -m bench.prediction [--fleet mixed=2] [--seconds 90] [--out PATH]

It starts a server of this checkout with the goodput policy, sends chats at a steady rate, then more of them with long
prompts among them, and asks the server to explain every request. The error of a prediction is |predicted / actual - 1|;
of TPOT the prediction is what is told as usual.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
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
from bench.mixture import MIXTURES, Mixture
from bench.own_server import commit
from bench.plot import Panel, sheet
from bench.progress import say
from bench.sitting import BASE_FLAGS, OpenServer, open_server, settle, warm_up
from bench.sse import Outcome
from bench.standings import table
from bench.summary import SloTargets
from bench.surge import LoadSpan, bounds, timed_in_spans

CHAT, LONG = MIXTURES["long-mixed"].kinds
# Nothing is refused, so that every prediction is seen; and 64 tokens are too few for a mean to be foreseen: what a
# chance prompt or two take of them is as much as the tokens themselves.
CHATS = replace(CHAT, service_class=None, output_tokens=128, slo=SloTargets(ttft_ms=1000.0, tpot_ms=40.0))
KINDS = (CHATS, LONG, replace(CHATS, name="repeating", repeats=8))  # the last accept most of what is drafted
STEADY, CHANGED = "steady", "changed"
SETTLED = 20.0  # seconds: the warm-up's load before is another one, and workers' shares of prompts remember it for 10 s
AFTER_CHANGE = 5.0  # seconds that are shown apart
SLOT = 4.0  # seconds of requests that a point of the plot is the median of
MEASURES = ("ttft", "tpot", "queue", "prefill", "transfer")
# Where predictions are in an explanation: of TPOT what is told, and beside it what placements are compared by.
SOURCES = {name: name for name in MEASURES} | {"tpot": "usual_tpot", "mean_tpot": "tpot"}
TARGET = 15.0  # percent


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """A request that came `at` seconds after the beginning: what was predicted and observed, in seconds by measure."""

    at: float
    kind: str
    predicted: dict[str, float]
    actual: dict[str, float]
    placement: str

    def error(self, measure: str) -> float | None:
        """Of the prediction, relative to what came; None where there is nothing to compare."""
        predicted, actual = self.predicted.get(measure), self.actual.get(measure)
        return abs(predicted / actual - 1.0) if predicted is not None and actual else None


def explained_of(told: dict[str, Any], at: float, kind: str) -> Explained | None:
    """The last attempt of an answer of GET /v1/requests/{id}/explain; None where there was no prediction."""
    attempts = told["sequences"][0]["attempts"]
    if not attempts or attempts[-1]["predicted"] is None:
        return None
    last = attempts[-1]
    return Explained(
        at=at,
        kind=kind,
        predicted={name: last["predicted"][source] for name, source in SOURCES.items()},
        actual={name: value for name in MEASURES if (value := last["actual"][name]) is not None},
        placement=last["decode"] if last["prefill"] == last["decode"] else f"{last['prefill']} → {last['decode']}",
    )


async def predictions(server: OpenServer, spans: Sequence[LoadSpan], seed: int) -> tuple[list[Explained], int]:
    """Every request of the spans, explained, and how many there are no predictions of."""
    timed = timed_in_spans(KINDS, spans, seed=seed)
    prepared, arrivals = server.prepare(timed), tuple(one.at for one in timed)
    began = server.endpoint.client.clock()
    run = await run_load(server.endpoint, prepared, Pace(arrivals=arrivals), Watch(finished=progress(len(prepared))))
    say(f"asking for explanations of {len(run.outcomes)} requests")
    found, missing = [], 0
    for outcome in run.outcomes:
        explained = None
        if outcome.id:
            try:
                answer = await server.endpoint.client.get(f"/v1/requests/{outcome.id}/explain")
            except TransportError as error:
                raise ServerError(f"{server.endpoint.target.url}: {error}") from error
            if answer.status == 200:
                explained = explained_of(orjson.loads(answer.body), outcome.scheduled - began, outcome.kind)
        if explained is None:
            missing += 1
        else:
            found.append(explained)
    await settle(server)
    return found, missing


def progress(total: int) -> Callable[[Outcome], None]:
    """Says how many requests have ended, after every tenth of them."""
    every, ended, failed = max(1, total // 10), 0, 0

    def finished(outcome: Outcome) -> None:
        nonlocal ended, failed
        ended, failed = ended + 1, failed + (outcome.error is not None)
        if ended % every == 0 or ended == total:
            say(f"{ended}/{total} requests have ended" + (f", {failed} failed" if failed else ""))

    return finished


def looks(spans: Sequence[LoadSpan]) -> list[tuple[str, float, float]]:
    """Name, first and last second of what is shown: load that is steady, and what comes right after a change."""
    (_, first, change), (_, _, last) = bounds(spans)
    settled = first + min(SETTLED, (change - first) / 3)
    half = (settled + change) / 2
    return [
        (f"first {settled - first:g} s", first, settled),
        ("steady", settled, change),
        ("steady, first half", settled, half),
        ("steady, second half", half, change),
        (f"{AFTER_CHANGE:g} s after the change", change, change + AFTER_CHANGE),
        ("changed, second half", (change + last) / 2, last),
    ]


def errors_table(explained: Sequence[Explained], spans: Sequence[LoadSpan]) -> str:
    """Median absolute errors, and the bias, by span, kind and measure; beside them what one number could have had."""
    rows = []
    for name, first, last in looks(spans):
        within = [one for one in explained if first <= one.at < last]
        for kind in ("all", *(kind.name for kind in KINDS)):
            own = [one for one in within if kind in ("all", one.kind)]
            if own:
                figures = [told for measure in MEASURES[:2] for told in (_cell(own, measure), _constant(own, measure))]
                rows.append([name, kind, str(len(own)), *figures])
    heads = [
        told
        for measure in MEASURES[:2]
        for told in (f"{measure.upper()}: median error, 90 %, bias", "of the best constant in hindsight")
    ]
    return table(["when", "requests", "number", *heads], rows)


def _cell(explained: Sequence[Explained], measure: str) -> str:
    errors = sorted(error for one in explained if (error := one.error(measure)) is not None)
    if not errors:
        return "—"
    ratios = [one.predicted[measure] / one.actual[measure] for one in explained if one.actual.get(measure)]
    most, bias = errors[int(0.9 * len(errors))], statistics.median(ratios) - 1
    return f"{statistics.median(errors):.1%}, {most:.0%}, {bias:+.1%}"


def _constant(explained: Sequence[Explained], measure: str) -> str:
    """The median error of the one number that has the least: what is left when all that is known is what was usual."""
    seen = [one.actual[measure] for one in explained if one.error(measure) is not None]
    if not seen:
        return "—"
    return f"{min(statistics.median(abs(guess / actual - 1.0) for actual in seen) for guess in seen):.1%}"


def drawing(explained: Sequence[Explained], spans: Sequence[LoadSpan], heading: str) -> str:
    """Predicted and observed medians over time, and the median error of both, as SVG."""
    changes = [last for _, _, last in bounds(spans)[:-1]]
    panels = []
    for measure in MEASURES[:2]:
        own = [one for one in explained if one.error(measure) is not None]
        curves = {
            "predicted": _over_time([(one.at, 1e3 * one.predicted[measure]) for one in own]),
            "observed": _over_time([(one.at, 1e3 * one.actual[measure]) for one in own]),
        }
        title = f"{measure.upper()} of chats and long prompts together, ms, median of {SLOT:g} s"
        panels.append(Panel(title=title, x_label="seconds", curves=curves, changes=changes))
        off = {"error": _over_time([(one.at, 100 * (one.error(measure) or 0.0)) for one in own])}
        title = f"{measure.upper()}: median absolute error of predictions, %"
        panels.append(Panel(title=title, x_label="seconds", curves=off, limit=TARGET, changes=changes))
    return sheet(heading, panels, ["predicted", "observed", "error"])


def _over_time(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    slots: dict[int, list[float]] = {}
    for at, value in points:
        slots.setdefault(int(at // SLOT), []).append(value)
    return [((slot + 0.5) * SLOT, statistics.median(values)) for slot, values in sorted(slots.items())]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prediction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--fleet", default="mixed=2", metavar="mixed=2", help="workers (mixed=2)")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of the server")
    add("--seconds", type=float, default=90.0, metavar="S", help="of each of the two loads (90)")
    add(
        "--chats", default="0.4,0.5", metavar="X,X", help="chats before and after the change, as shares of the capacity"
    )
    add("--long", default="0,0.05", metavar="X,X", help="long prompts, likewise: one costs as much as several chats")
    add("--repeating", default="0,0", metavar="X,X", help="chats whose prompts repeat themselves, likewise")
    add("--capacity", type=float, metavar="R", help="chats a second, instead of measuring it")
    add("--warm-up", type=float, default=15.0, metavar="S", help="seconds of a closed loop (15)")
    add("--seed", type=int, default=0, metavar="N", help="(0)")
    add("--out", type=Path, default=Path("bench-prediction"), metavar="PATH", help="beginning of files")
    return parser


def spans_of(args: argparse.Namespace, capable: float) -> list[LoadSpan]:
    """Raises ValueError that names the flag."""
    for name, value in (("seconds", args.seconds), ("warm-up", args.warm_up), ("capacity", args.capacity)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} {value:g}: give a number above 0")
    shares = [shares_of(name, text) for name, text in _rates(args)]
    return [
        LoadSpan(
            name=name,
            seconds=args.seconds,
            rates={kind.name: capable * pair[number] for kind, pair in zip(KINDS, shares, strict=True)},
        )
        for number, name in enumerate((STEADY, CHANGED))
    ]


def _rates(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Flags and what they say, of each of KINDS."""
    return ("chats", args.chats), ("long", args.long), ("repeating", args.repeating)


def told_rates(spans: Sequence[LoadSpan]) -> str:
    return "; ".join(
        f"{span.name} {span.seconds:g} s: "
        + ", ".join(f"{rate:.2f} {kind}/s" for kind, rate in span.rates.items() if rate)
        for span in spans
    )


def shares_of(name: str, text: str) -> list[float]:
    """`0.4,0.5` → both. Raises ValueError."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 2 or not all(0 <= share < math.inf for share in shares):
        raise ValueError(f"--{name} {text}: give two shares of the capacity, before and after the change")
    return shares


async def measure_predictions(args: argparse.Namespace) -> None:
    """Measures and writes. Raises ServerError, ValueError."""
    _, fleet = parse_fleet(args.fleet)
    contender = Contender(name="prediction", flags=(*fleet, "--routing-policy", "goodput"))
    spans_of(args, 1.0)
    base = [*BASE_FLAGS, *shlex.split(args.serve_flags)]
    mixture = Mixture(name="prediction", kinds=KINDS[:1])
    async with AsyncExitStack() as stack:
        say(f"starting a server: {shlex.join(contender.flags)} {args.serve_flags}")
        server = await open_server(contender, mixture, stack, base=base, folder=args.out.parent)
        if args.capacity is None:
            say(f"warm-up: a closed loop for {args.warm_up:g} s or somewhat longer")
        capable = args.capacity or await warm_up(server, mixture, args.warm_up)
        spans = spans_of(args, capable)
        say(f"capacity {capable:.2f} chats/s; {told_rates(spans)}: {sum(span.seconds for span in spans):g} s")
        explained, missing = await predictions(server, spans, args.seed)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    about = f"{started}, commit {commit()}. {shlex.join(contender.flags)} {args.serve_flags}. {told_rates(spans)}."
    text = f"{about} {missing} requests without a prediction.\n\n{errors_table(explained, spans)}\n"
    args.out.with_suffix(".md").write_text(text)
    args.out.with_suffix(".svg").write_text(
        drawing(explained, spans, "Predicted and observed, before and after a change")
    )
    told = {"about": about, "spans": [asdict(span) for span in spans], "requests": [asdict(one) for one in explained]}
    args.out.with_suffix(".json").write_text(json.dumps(told))
    print(text)


def main() -> int:
    try:
        asyncio.run(measure_predictions(arguments().parse_args()))
    except (ServerError, ValueError, OSError) as error:
        say(f"bench.prediction: {error}")
        return 2
    except KeyboardInterrupt:
        say("bench.prediction: interrupted, nothing is written")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
