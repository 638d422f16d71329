"""The page of `bench.gpu`: one table of figures, the steps and how they ended, the device, and the commands.

Pure: records in, Markdown out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.gpu_rows import GpuRow, kernel_rows, served_rows, step_rows
from bench.gpu_run import PASSED, GpuRecord
from bench.gpu_stages import NOT_BUILT, STAGE_SECONDS, STAGES, GpuStep

HEAD = ("kernel or step", "measured", "ceiling measured in the same run", "share", "expected by the review", "verdict")
NO_MEANING = "**In miniature, on a CPU: it shows that every stage runs. No figure here means anything.**"
WATCHED = {"memory_mib": "device MiB", "host_mib": "host MiB", "sm_mhz": "SM MHz", "watts": "W", "celsius": "°C"}

Recorded = Sequence[tuple[GpuStep, GpuRecord | None]]


def page(
    facts: Mapping[str, str], revision: str, when: str, command: str, recorded: Recorded, *, miniature: bool
) -> str:
    """Markdown of everything that was recorded; a step without a record has not run."""
    lines = [f"# {facts.get('name', 'unknown device')}: bench.gpu", ""]
    if miniature:
        lines += [NO_MEANING, ""]
    lines += [
        f"{when}, commit {revision}. `{command}`",
        "",
        "; ".join(f"{key} {value}" for key, value in facts.items()),
    ]
    lines += ["", *table(HEAD, [cells(row, miniature) for row in rows(recorded)]), "", "## Steps", ""]
    lines += table(("step", "what", "result", "seconds", "limit", "seen meanwhile"), [*map(_step_cells, recorded)])
    lines += ["", *(f"- {text}" for text in NOT_BUILT.values()), "", "## Commands", ""]
    lines += [f"    {record.command}" for _, record in recorded if record is not None and record.command]
    for step, record in recorded:
        if record is not None and record.status != PASSED and record.tail:
            lines += ["", f"## {step.name}: {record.status}", "", *(f"    {line}" for line in record.tail.splitlines())]
    return "\n".join(lines) + "\n"


def rows(recorded: Recorded) -> list[GpuRow]:
    """Every figure there is, also of steps that failed later; a step without any has a row of its own."""
    figures = {step.name: record.figures for step, record in recorded if record is not None}
    found = []
    for step, record in recorded:
        if record is None:
            continue
        found += of_step(step, figures)
        if step.stage == 1:  # pytest's own last line: how many passed, and how many were left out
            found.append(GpuRow(name=step.name, measured=last_line(record), verdict=record.status))
        elif record.status != PASSED:
            took = f"{record.status} in {record.seconds:.0f} s"
            found.append(GpuRow(name=step.name, measured=took, verdict=record.status))
    return found


def last_line(record: GpuRecord) -> str:
    return record.tail.splitlines()[-1] if record.tail else f"{record.status} in {record.seconds:.0f} s"


def of_step(step: GpuStep, figures: Mapping[str, Mapping[str, object]]) -> list[GpuRow]:
    module = step.command[0]
    if module == "bench.kernels":
        return kernel_rows(figures[step.name])
    if module == "bench.gpu_decode":
        return step_rows(figures[step.name])
    return served_rows(step.name, figures) if module == "bench.gpu_served" else []


def cells(row: GpuRow, miniature: bool) -> tuple[str, ...]:
    share = "—" if row.share is None else f"{row.share:.0%}"
    verdict = "means nothing" if miniature and row.share is not None else row.verdict
    return row.name, row.measured, row.ceiling, share, row.expected, verdict


def _step_cells(at: tuple[GpuStep, GpuRecord | None]) -> tuple[str, ...]:
    step, record = at
    limit = f"{step.limit:.0f}"
    if record is None:
        return step.name, step.what, "not run", "", limit, ""
    seen = [_seen(name, record.watched[name]) for name in WATCHED if name in record.watched]
    result = f"{record.status}{f', {record.why}' if record.why else ''}"
    return step.name, step.what, result, f"{record.seconds:.1f}", limit, ", ".join(seen)


def _seen(name: str, limits: Sequence[float]) -> str:
    """Memory at its highest; all else from the lowest to the highest."""
    low, high = limits
    return f"{high:,.0f} {WATCHED[name]}" if name.endswith("mib") else f"{low:,.0f}–{high:,.0f} {WATCHED[name]}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    ruler = "|" + "---|" * len(head)
    return [_line(head), ruler, *map(_line, lines)]


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def plan_text(steps: Sequence[GpuStep], done: Mapping[str, bool], commands: Mapping[str, str]) -> str:
    """What would be run, stage by stage, with seconds expected and at most."""
    lines = []
    for stage, name in STAGES.items():
        own = [step for step in steps if step.stage == stage]
        if not own:
            continue
        expected = sum(step.expected for step in own)
        limit = min(STAGE_SECONDS, sum(step.limit for step in own))
        lines.append(f"stage {stage}, {name}: about {expected:.0f} s, at most {limit:.0f} s")
        for step in own:
            passed = " (passed before)" if done.get(step.name) else ""
            lines.append(f"  {step.name:16} {step.expected:4.0f} s of {step.limit:4.0f} s  {step.what}{passed}")
            lines.append(f"    {commands[step.name]}")
    return "\n".join([*lines, *NOT_BUILT.values()])
