"""Writes results for people and for programs: aligned tables for the terminal, JSON for files.

Pure: results in, text or bytes out. The names in the JSON are those of vLLM's benchmark.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import orjson

from bench.options import BenchOptions, Point
from bench.session import Found, Measurement, Results
from bench.summary import median_metrics, ratios

RATES = (
    ("req/s", "request_throughput"),
    ("output tok/s", "output_throughput"),
    ("total tok/s", "total_token_throughput"),
)
GOODPUT = (("good req/s", "request_goodput"), ("attained", "slo_attainment"))
SWEEP = (
    ("req/s", "request_throughput"),
    ("output tok/s", "output_throughput"),
    ("TTFT p50", "median_ttft_ms"),
    ("TTFT p99", "p99_ttft_ms"),
    ("TPOT p50", "median_tpot_ms"),
    ("TPOT p99", "p99_tpot_ms"),
)
LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
SPREADS = (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99"))

Row = list[str]


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Columns under each other: the first `texts` to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.ljust(size) if at < texts else cell.rjust(size) for at, (cell, size) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Four figures or so; a dash for what could not be had."""
    if value is None:
        return "—"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def cell(key: str, metrics: Mapping[str, float]) -> str:
    """A figure as a table shows it: shares in percent, all else as a number."""
    value = metrics.get(key)
    return f"{value:.1%}" if key == "slo_attainment" and value is not None else number(value)


def point_report(results: Results, options: BenchOptions, point: Point) -> str:
    """Three tables for one load, throughput and latencies: each server, and its ratio to the baseline."""
    measured = {target.name: results.at(point, target.name) for target in options.targets}
    measured = {name: rounds for name, rounds in measured.items() if rounds}
    rates = RATES + (GOODPUT if options.slo.given else ())
    tables = [_table("", rates, measured, options.baseline, counts=True)]
    for kinds in (LATENCIES[:2], LATENCIES[2:]):
        columns = [(f"{kind} {head}", f"{key}_{stem}_ms") for kind, stem in kinds for head, key in SPREADS]
        tables.append(_table("ms", columns, measured, options.baseline))
    return "\n".join([title(options, point), "", "\n\n".join(tables), *problems(measured)])


def _table(
    corner: str,
    columns: Sequence[tuple[str, str]],
    measured: Mapping[str, Sequence[Measurement]],
    baseline: str,
    *,
    counts: bool = False,
) -> str:
    """One row a server, and one of ratios under each but the baseline; `!` marks those without a clean round."""
    medians = {name: median_metrics([one.summary for one in rounds]) for name, rounds in measured.items()}
    marks = {name: "" if any(one.summary.clean for one in rounds) else "!" for name, rounds in measured.items()}
    rows: list[Row] = [[corner, *(head for head, _ in columns), *(("done", "failed") if counts else ())]]
    for name, metrics in medians.items():
        row = [name + marks[name], *(cell(key, metrics) for _, key in columns)]
        if counts:
            row += [str(sum(one.summary.completed for one in measured[name]))]
            row += [str(sum(one.summary.failed for one in measured[name]))]
        rows.append(row)
        if name != baseline and baseline in medians:
            times = ratios(metrics, medians[baseline])
            against = f"  vs {baseline}{marks[name] or marks[baseline]}"
            rows.append([against, *(multiple(times.get(key)) for _, key in columns), *(("", "") if counts else ())])
    return aligned(rows)


def title(options: BenchOptions, point: Point | None) -> str:
    """One line: the work, the load, how often, and what counts as good."""
    parts = [options.workload.describe()]
    if point is not None:
        parts += [point.describe(), f"{options.count(point)} requests"]
    if options.repeat > 1:
        parts.append(f"median of {options.repeat} rounds")
    if options.slo.given:
        parts.append(f"good: {options.slo.describe()}")
    return "── " + " · ".join(parts)


def multiple(value: float | None) -> str:
    """A ratio, or nothing where there is none."""
    return "" if value is None else f"{value:.2f}×"


def problems(measured: Mapping[str, Sequence[Measurement]]) -> list[str]:
    """One line for each thing that went wrong, each naming its server."""
    lines = []
    for name, rounds in measured.items():
        planned = sum(one.summary.planned for one in rounds)
        for kind in dict.fromkeys(kind for one in rounds for kind in one.summary.errors):
            count = sum(one.summary.errors.get(kind, 0) for one in rounds)
            detail = next(one.summary.examples[kind] for one in rounds if kind in one.summary.examples)
            lines.append(f"! {name}: {count} of {planned} requests failed: {kind}{f': {detail}' if detail else ''}")
        ended = [one for one in rounds if one.summary.stopped != "hopeless"]  # given up on purpose: nothing went wrong
        clean = sum(one.summary.clean for one in ended)
        if 0 < clean < len(ended):
            lines.append(f"! {name}: the medians are of the {clean} of {len(ended)} rounds without errors")
        elif ended and not clean:
            lines.append(f"! {name}: no round ended cleanly; its figures cover only the requests that succeeded")
        lines += [f"! {name}: {warning}" for one in rounds for warning in one.summary.warnings]
    return ["", *dict.fromkeys(lines)] if lines else []


def sweep_report(results: Results, options: BenchOptions) -> str:
    """One line for each server and load, to see the curve at a glance; failures too where no other table says them."""
    notes: list[str] = []
    if options.search is not None:
        notes = problems({target.name: results.of(target.name) for target in options.targets})
    rows: list[Row] = [["load", "server", *(head for head, _ in SWEEP), "attained", "failed"]]
    for point in loads(results):
        for target in options.targets:
            if rounds := results.at(point, target.name):
                metrics = median_metrics([one.summary for one in rounds])
                failed = sum(one.summary.failed for one in rounds)
                cells = [number(metrics.get(key)) for _, key in SWEEP]
                rows.append([point.describe(), target.name, *cells, attained(rounds), str(failed)])
    return "\n".join([title(options, None), "", aligned(rows), *notes])


def attained(rounds: Sequence[Measurement]) -> str:
    """The share of good requests; a measurement given up as hopeless tells only that it was missed."""
    if any(one.summary.stopped == "hopeless" for one in rounds):
        return "missed"
    return cell("slo_attainment", median_metrics([one.summary for one in rounds]))


def loads(results: Results) -> list[Point]:
    """The loads measured, from the lightest."""
    return sorted({one.point for one in results.measurements}, key=lambda point: point.load)


def goodput_report(results: Results, options: BenchOptions) -> str:
    """The highest rate of each server that meets the objectives, and its ratio to the baseline."""
    answers = {target.name: median_found(results.found, target.name) for target in options.targets}
    rows: list[Row] = [["", "highest rate", "all rounds", f"× {options.baseline}"]]
    base = answers[options.baseline]
    for name, rate in answers.items():
        rates = [found.rate for found in results.found if found.target == name and found.complete]
        shown = "none attains" if rate is None else f"{rate:.3g} req/s"
        ratio = multiple(rate / base) if rate and base and name != options.baseline else ""
        rows.append([name, shown, ", ".join("none" if one is None else f"{one:.3g}" for one in rates), ratio])
    aim = f"highest rate at which {options.slo.attainment:.0%} of requests meet {options.slo.describe()}"
    return "\n".join([f"── {options.workload.describe()} · {aim}", "", aligned(rows)])


def median_found(found: Sequence[Found], target: str) -> float | None:
    """The middle of the rates that complete searches found; None, counted as the lowest, when that is the middle."""
    rates = sorted(one.rate or 0.0 for one in found if one.target == target and one.complete)
    return rates[(len(rates) - 1) // 2] or None if rates else None


def results_json(results: Results, options: BenchOptions, *, started_at: str) -> bytes:
    """Everything as JSON: options (no headers, they may hold keys), every round, medians and ratios."""
    asked = asdict(options)
    for private in ("headers", "json_file", "plot_file", "details"):
        del asked[private]
    asked["workload"] |= {"pairs": len(options.workload.pairs), "trace": len(options.workload.trace)}
    document = {
        "started_at": started_at,
        "host": {"cores": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()},
        "options": asked,
        "models": results.models,
        "notes": results.notes,
        "interrupted": results.interrupted,
        "points": [_point_json(results, options, point) for point in loads(results)],
        "goodput": {
            "searches": [asdict(found) for found in results.found],
            "median_rate": {target.name: median_found(results.found, target.name) for target in options.targets},
        }
        if options.search is not None
        else None,
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2, default=str)


def _point_json(results: Results, options: BenchOptions, point: Point) -> dict[str, object]:
    rounds = {target.name: results.at(point, target.name) for target in options.targets}
    medians = {name: median_metrics([one.summary for one in ones]) for name, ones in rounds.items() if ones}
    base = medians.get(options.baseline, {})
    return {
        "concurrency": point.concurrency,
        "rate": point.rate,
        "rounds": [_round_json(one) for ones in rounds.values() for one in ones],
        "median": medians,
        "ratio": {name: ratios(metrics, base) for name, metrics in medians.items() if name != options.baseline},
    }


def _round_json(one: Measurement) -> dict[str, object]:
    summary = asdict(one.summary) | {"failed": one.summary.failed, "clean": one.summary.clean}
    fields: dict[str, object] = {"target": one.target, "round": one.round, **summary}
    if one.outcomes:
        fields["requests"] = [asdict(outcome) | {"text": "".join(outcome.text)} for outcome in one.outcomes]
    return fields
