"""Rows of the table of `bench.gpu`: figures of steps beside ceilings of the same run and what a review expected.

Pure: figures in, rows out. Expectations are shares of measured ceilings, so that they hold on other devices as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BEYOND, WITHIN, BELOW, UNJUDGED = "beyond", "as expected", "below", "—"
LAST_READY_SECONDS = 30.0  # of a start that is not the first
LEAST_LINK_SHARE = 0.5  # of what a handoff's bytes take to cross to the host
LIKE_SHAPE = "8b"  # what the review expects something of
LIKE_CONTEXT = 1024  # of stage 3's rows that served steps are held against

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One line. `share` is of the ceiling."""

    name: str
    measured: str
    ceiling: str = "—"
    share: float | None = None
    expected: str = "—"
    verdict: str = UNJUDGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the review says of the rows whose name matches: from `low` on as expected, from `high` on beyond."""

    pattern: str
    told: str
    low: float
    high: float = 2.0


EXPECTED = (
    Expectation(pattern=r"decode attention 64 x 4096, bfloat16", told="75–85 % of bandwidth", low=0.75, high=0.85),
    Expectation(pattern=r"prompt attention .*bfloat16", told="300–400 of 790 TFLOP/s", low=300 / 790, high=400 / 790),
    Expectation(pattern=r"int8 linear .*\b(8192 x 8192|4096 rows)", told="850–1,100 TOP/s; ≥ 75 % asked for", low=0.75),
    Expectation(pattern=r"int8 linear .*\b(1|8|16|32|64) rows", told="55–85 %", low=0.55, high=0.85),
    Expectation(pattern=r"step bfloat16, 1 x 1024", told="4.5 ms, 75–80 % of the roof", low=0.75, high=0.8),
)


def judged(name: str, share: float) -> tuple[str, str]:
    """What was expected of it, and the verdict."""
    for one in EXPECTED:
        if re.match(one.pattern, name):
            return one.told, BEYOND if share >= one.high else WITHIN if share >= one.low else BELOW
    return "—", UNJUDGED


def kernel_rows(figures: Figures) -> list[GpuRow]:
    rows = []
    for row in figures.get("rows", ()):
        told, verdict = judged(row["name"], row["share"])
        if row["name"].startswith("top-p"):
            told, verdict = "4–8 ms at 256", WITHIN if row["seconds"] <= 8e-3 else BELOW
        beside = f", {row['note']}" if row["note"] else ""  # of a library that computes the same
        measured = f"{1e6 * row['seconds']:,.0f} µs, {row['rate']:,.0f} {row['unit']}{beside}"
        ceiling = f"{row['ceiling']:,.0f} {row['unit']}"
        rows.append(
            GpuRow(
                name=row["name"],
                measured=measured,
                ceiling=ceiling,
                share=row["share"],
                expected=told,
                verdict=verdict,
            )
        )
    return rows


def step_rows(figures: Figures) -> list[GpuRow]:
    rows = []
    for row in figures.get("rows", ()):
        shape = figures.get("shape", LIKE_SHAPE)
        of = "" if shape == LIKE_SHAPE else f"{shape} "
        name = f"{of}step {row['weights']}, {row['batch']} x {row['context']}"
        share = row["roofline_share"]
        told, verdict = judged(name, share)
        graph = f", graph of {row['graph_context']:,}" if row["graph_context"] else ", no graph"
        roof = 1e3 * row["step_bytes"] / row["copy_bytes_per_second"]
        measured = f"{row['step_ms']:.2f} ms, {row['tokens_per_second']:,.0f} tok/s"
        rows.append(
            GpuRow(
                name=name + graph,
                measured=measured,
                ceiling=f"{roof:.2f} ms ({row['copy_bytes_per_second'] / 1e9:,.0f} GB/s)",
                share=share,
                expected=told,
                verdict=verdict,
            )
        )
    rows += [GpuRow(name=line, measured="left out") for line in figures.get("skipped", ())]
    rows += [
        GpuRow(
            name=f"peak memory of steps, {figures.get('shape', LIKE_SHAPE)}, {weights}",
            measured=f"{size / 2**30:.1f} GiB",
        )
        for weights, size in figures.get("peak_bytes", {}).items()
        if size
    ]
    return rows


def served_rows(step: str, all_figures: Mapping[str, Figures]) -> list[GpuRow]:
    """Rows of a served step; others' figures are what TPOT, TTFT and handoffs are held against."""
    figures = all_figures[step]
    rows = _start_rows(step, figures)
    if "long_prompts" in figures:
        found = figures["long_prompts"]
        rows.append(GpuRow(name=f"{step}: TTFT of {found['tokens']:,} tokens", measured=f"{found['ttft_ms']:,.1f} ms"))
    weights = "quantized" if "int8" in step else "bfloat16"
    for name, found in figures.items():
        if name.startswith("concurrency_"):
            rows.append(
                _rhythm_row(f"{step}: TPOT at {name[12:]}", found, _step_ms(all_figures, weights, int(name[12:])))
            )
    if "handoff" in figures:
        rows += _handoff_rows(step, figures, all_figures)
    if "same_tokens" in figures:
        same = figures["same_tokens"]
        told = f"{same['equal']} of {same['of']} texts{': ' + same['differs'] if same['differs'] else ''}"
        equal = WITHIN if same["equal"] == same["of"] else "differ"
        rows.append(GpuRow(name=f"{step}: tokens as mixed gives", measured=told, expected="all equal", verdict=equal))
    return rows


def _start_rows(step: str, figures: Figures) -> list[GpuRow]:
    if "ready_s" not in figures:
        return []
    seconds = figures["ready_s"]
    told, verdict = "1–3 min of tuning", UNJUDGED
    if step == "mixed-bfloat16":
        told, verdict = "≤ 30 s the second time (asked for)", WITHIN if seconds <= LAST_READY_SECONDS else BELOW
    measured = f"{seconds:.1f} s, first answer at {figures.get('first_answer_s', seconds):.1f} s"
    return [GpuRow(name=f"{step}: start to ready", measured=measured, expected=told, verdict=verdict)]


def _rhythm_row(name: str, found: Figures, ceiling_ms: float | None, of: str = "a bare step") -> GpuRow:
    """What streams see beside the bare step of stage 3, or beside streams `of` another kind."""
    share = ceiling_ms / found["itl_ms"] if ceiling_ms and found["itl_ms"] else None
    measured = f"{found['itl_ms']:.2f} ms between tokens (TPOT {found['tpot_ms']:.2f} ms)"
    bare = "—" if ceiling_ms is None else f"{ceiling_ms:.2f} ms {of}"
    return GpuRow(name=name, measured=measured, ceiling=bare, share=share)


def _step_ms(all_figures: Mapping[str, Figures], weights: str, batch: int) -> float | None:
    found = all_figures.get(f"steps-{weights}", {}).get("rows", ())
    return next((row["step_ms"] for row in found if (row["batch"], row["context"]) == (batch, LIKE_CONTEXT)), None)


def _handoff_rows(step: str, figures: Figures, all_figures: Mapping[str, Figures]) -> list[GpuRow]:
    copies = all_figures.get("link", {}).get("copies")
    link = None if copies is None else 1 / (1 / copies["to_host"] + 1 / copies["to_device"])
    handoff, rows = figures["handoff"], []

    def rate_row(name: str, rate: float, told: str, judge: Callable[[float], str]) -> GpuRow:
        share = None if link is None else rate / link
        ceiling = "—" if link is None else f"{link / 1e9:.1f} GB/s to the host and back"
        verdict = UNJUDGED if share is None else judge(share)
        measured = f"{rate / 1e9:.2f} GB/s"
        return GpuRow(name=name, measured=measured, ceiling=ceiling, share=share, expected=told, verdict=verdict)

    each = f"{handoff['bytes_each'] / 2**20:,.1f} MiB"
    exposed = f"{step}: handoff of {each}, by what second tokens wait"
    told = "≥ 50 % of the link (asked for)"
    rows.append(
        rate_row(
            exposed,
            handoff["exposed_bytes_per_second"],
            told,
            lambda share: WITHIN if share >= LEAST_LINK_SHARE else BELOW,
        )
    )
    if "during_handoffs" in figures:
        beside = figures["during_handoffs"]
        sustained = f"{step}: handoffs in a row, prefill included"
        rows.append(rate_row(sustained, beside["sustained_bytes_per_second"], "—", lambda share: UNJUDGED))
        quiet = figures.get(f"concurrency_{beside['streams']}", {}).get("itl_ms")
        row = _rhythm_row(f"{step}: TPOT of {beside['streams']} streams during handoffs", beside, quiet, "without")
        rows.append(row)
    return rows
