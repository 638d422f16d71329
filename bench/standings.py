"""Writes comparisons down: Markdown for people, JSON for programs. Pure: standings in, text out."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.mixture import Mixture
from bench.race import Standing
from bench.report import number
from bench.step_lags import BUSY, LATE, strain


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One workload, and how every contender stands; the first is the one that ratios are against."""

    name: str
    mixture: Mixture
    standings: Sequence[Standing]
    goal: float  # share that has to be attained
    seeds: int
    seconds: float  # of arrivals in a run


def markdown(results: Sequence[CaseResult], *, started_at: str, commit: str) -> str:
    """A section for each case: goodputs and ratios, then the share attained by rate."""
    intro = (
        f"{started_at}, commit {commit or 'unknown'}. Goodput: the highest rate, in requests a second, at which the"
        " share of offered requests named below meets TTFT and TPOT; refused and failed requests count as missed."
        " `crossing` is where the straight line between the highest rate that attains and the next that does not"
        " crosses the goal; ratios are of crossings."
    )
    return "\n\n".join([intro, *(_section(result) for result in results)]) + "\n"


def _section(result: CaseResult) -> str:
    mixture = result.mixture
    about = f"{mixture.describe()}. Goal {result.goal:.0%}, {result.seeds} seeds of {result.seconds:g} s of arrivals."
    about += _machine(result)
    return "\n\n".join([f"## {result.name}: {mixture.name}", about, _goodputs(result), _curves(result)])


def _machine(result: CaseResult) -> str:
    """How busy it was in runs that tell, and how much longer paced steps lasted than they were to."""
    runs = [run.metrics for one in result.standings for each in one.trials.values() for run in each]
    busy, late = (sorted(run[name] for run in runs if name in run) for name in (BUSY, LATE))
    if not busy or not late:
        return ""
    spans = [f"{each[0]:.1%} to {each[-1]:.1%} ({statistics.median(each):.1%} in the median)" for each in (busy, late)]
    return f" The machine was busy {spans[0]}; steps lasted longer than they were to by {spans[1]}."


def _goodputs(result: CaseResult) -> str:
    first = result.standings[0]
    heads = ["contender", "goodput", "fails at", "crossing", f"{first.contender.name} ÷ it", "attained by kind", ""]
    rows = []
    for standing in result.standings:
        ratio = first.figure / standing.figure if first.figure and standing.figure else None
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in standing.by_kind().items())
        notes = [] if standing.finished else ["unfinished"]
        notes += [f"{count} {kind}" for kind, count in standing.errors().items()]
        strained = sum(bool(strain(run.metrics)) for each in standing.trials.values() for run in each)
        notes += [f"{strained} runs on an overloaded machine: not to be believed"] if strained else []
        shown = [number(value) for value in (standing.rate, standing.failing, standing.crossing)]
        shown.append("" if ratio is None else f"{ratio:.2f}×")
        rows.append([standing.contender.name, *shown, kinds, ", ".join(notes)])
    return table(heads, rows)


def _curves(result: CaseResult) -> str:
    rates = sorted({rate for standing in result.standings for rate in standing.attained})
    found = [{number(rate): share for rate, share in standing.attained.items()} for standing in result.standings]
    shown = dict.fromkeys(map(number, rates))  # of searches that began elsewhere, rates may differ in the last bits
    rows = [[rate, *(f"{each[rate]:.1%}" if rate in each else "" for each in found)] for rate in shown]
    return table(["attained at", *(standing.contender.name for standing in result.standings)], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, the columns aligned for those who read it as text."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def as_json(results: Sequence[CaseResult], *, started_at: str, commit: str) -> dict[str, Any]:
    """Everything, every run included."""
    return {
        "started_at": started_at,
        "commit": commit,
        "cases": [
            {
                "name": result.name,
                "workload": asdict(result.mixture),
                "goal": result.goal,
                "seeds": result.seeds,
                "seconds": result.seconds,
                "contenders": [_told(standing) for standing in result.standings],
            }
            for result in results
        ],
    }


def _told(standing: Standing) -> dict[str, Any]:
    contender = standing.contender
    return {
        "name": contender.name,
        "server": contender.url or shlex.join(contender.flags),
        "goodput": standing.rate,
        "failing": standing.failing,
        "crossing": standing.crossing,
        "finished": standing.finished,
        "attained": [{"rate": rate, "share": share} for rate, share in standing.attained.items()],
        "by_kind": standing.by_kind(),
        "errors": standing.errors(),
        "runs": [asdict(trial) for trials in standing.trials.values() for trial in trials],
    }
