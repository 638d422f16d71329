"""Shows simulated rates and the goodput found, for people and for programs.

Pure: figures in, text or bytes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import orjson

from deploy.simulator.outcomes import RateFigures

BAR = 12  # characters of an attainment
GROWING = 0.05  # of the rate: with a backlog that grows by more, attainment depends on how long the run is
EIGHTHS = " ▏▎▍▌▋▊▉"

HEAD = ("req/s", "attained", "", "TTFT", "TPOT", "TTFT p50", "p90", "TPOT p50", "p90", "backlog", "failed")


@dataclass(slots=True, kw_only=True)
class PolicyResult:
    """All rates simulated for one policy. `goodput` is None where no rate attains, or where none was looked for."""

    policy: str
    rates: dict[float, RateFigures] = field(default_factory=dict)
    searched: bool = False
    goodput: float | None = None


def heading(parts: Sequence[str], objectives: Mapping[str, tuple[float | None, float | None]]) -> str:
    """What is simulated, and what counts as good, by class: milliseconds to the first token, and of each after it."""
    lines = ["── " + " · ".join(parts)]
    for name, (ttft, tpot) in objectives.items():
        limits = [f"{kind} ≤ {limit:.4g} ms" for kind, limit in (("TTFT", ttft), ("TPOT", tpot)) if limit is not None]
        lines.append(f"   {name}: {' and '.join(limits) or 'no objectives'}")
    return "\n".join(lines)


def rates_table(result: PolicyResult) -> str:
    """One line a rate, from the lowest. Milliseconds; `backlog` is by how many requests it grows in a second."""
    rates = sorted(result.rates.values(), key=lambda figures: figures.rate)
    lines = [_aligned([HEAD, *map(_row, rates)])]
    lines += [
        f"   ! broken off at {rate.rate:.2f} req/s: of the {rate.offered:,} requests that had ended"
        for rate in rates
        if not rate.whole
    ]
    return "\n".join(lines)


def _row(figures: RateFigures) -> tuple[str, ...]:
    return (
        f"{figures.rate:.2f}",
        f"{figures.attainment:.1%}",
        bar(figures.attainment),
        f"{figures.ttft_attainment:.1%}",
        f"{figures.tpot_attainment:.1%}",
        _number(figures.ttft_p50),
        _number(figures.ttft_p90),
        _number(figures.tpot_p50),
        _number(figures.tpot_p90),
        "—" if math.isnan(figures.backlog_slope) else f"{figures.backlog_slope:+.2f}",
        ", ".join(f"{count} {error}" for error, count in figures.errors.items()) or "—",
    )


def goodput_line(result: PolicyResult, workers: int, attainment: float) -> str:
    """The answer of a search in words."""
    if result.goodput is None:
        return f"goodput: no rate attains {attainment:.0%}"
    line = (
        f"goodput: {result.goodput:.3g} req/s at {attainment:.0%} attainment, {result.goodput / workers:.3g} a worker"
    )
    found = result.rates.get(result.goodput)
    if found is not None and found.backlog_slope > GROWING * found.rate:
        line += "\n   ! requests pile up at this rate: more of them (--requests) would attain less"
    return line


def comparison(results: Sequence[PolicyResult]) -> str:
    """The goodput of each policy beside the first's."""
    rows: list[tuple[str, ...]] = [("policy", "goodput", f"× {results[0].policy}")]
    base = results[0].goodput
    for result in results:
        shown = "none" if result.goodput is None else f"{result.goodput:.3g}"
        rows.append((result.policy, shown, f"{result.goodput / base:.2f}×" if result.goodput and base else "—"))
    return _aligned(rows)


def as_json(options: Mapping[str, object], results: Sequence[PolicyResult]) -> bytes:
    """Everything, with a row for each rate; what has no value is null."""
    found = [asdict(result) | {"rates": [asdict(rate) for rate in result.rates.values()]} for result in results]
    return orjson.dumps({"options": dict(options), "policies": found}, option=orjson.OPT_INDENT_2)


def bar(share: float) -> str:
    """A share of 1 as a bar of BAR characters."""
    eighths = round(share * BAR * 8)
    drawn = "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return drawn.ljust(BAR, "·")


def _number(milliseconds: float) -> str:
    return "—" if math.isnan(milliseconds) else f"{milliseconds:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join("   " + line.rstrip() for line in lines)
