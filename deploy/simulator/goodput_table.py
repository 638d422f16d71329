"""Goodput of policies, fleets and step budgets on simulated workers, beside each other: one command, within a time.

    python -m deploy.simulator.goodput_table --workers 64 --minutes 20 --jobs 3 --json goodput.json
    python -m deploy.simulator.goodput_table --workers 8 --minutes 10 --workloads long-mixed

Every row is measured once, then the row whose goodput is known worst again, until the time is over. With --json what is
there already is not measured again, so that a longer run goes on with a shorter one. It decides nothing about clusters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isinf
from pathlib import Path

import orjson

from bench.report import aligned
from deploy.simulator.crossing import Crossing
from deploy.simulator.profiles import PROFILES, profile_of
from deploy.simulator.run import quiet_log
from deploy.simulator.table_rows import BUDGETS_FOR, FLEETS, POLICIES, WORKLOADS, TableRow, seconds_each, table_rows

FIRST_SHARE = 0.85  # of what workers could serve that were always as busy as their objectives allow

Found = dict[str, Crossing]


class GoodputTable:
    """All rows and what is known of each, by its name."""

    def __init__(self, rows: Sequence[TableRow], known: Mapping[str, Mapping[str, float]], scale: float):
        """`known`: attained shares by rate, of rows by name. `scale`: workers for each of those that was measured on.

        With a scale of 1 they are measurements; else they say where to begin.
        """
        self.rows = rows
        self.found: Found = {}
        self.took: dict[str, float] = {}  # seconds of the last measurement
        for row in rows:
            before = Crossing(0.0, attained={float(rate): share for rate, share in known.get(row.name, {}).items()})
            guess = before.goodput or before.passing
            first = guess * scale if guess is not None else first_rate(row)
            self.found[row.name] = Crossing(first, attained=before.attained if scale == 1.0 else {})

    def next_row(self, left: float) -> TableRow | None:
        """The row that is known worst, of those whose next measurement is over in the seconds that are left."""
        usual = max(self.took.values(), default=0.0)
        open_ = [row for row in self.rows if not self.found[row.name].over and self.took.get(row.name, usual) <= left]
        return min(open_, key=lambda row: self._worst_first(self.found[row.name]), default=None)

    @staticmethod
    def _worst_first(crossing: Crossing) -> tuple[int, float]:
        """Never measured, then not yet between two rates, the least often first, then the widest."""
        if isinf(crossing.width):
            return len(crossing.attained), 0.0
        return 1 << 30, -crossing.width

    def measure(self, row: TableRow, jobs: int) -> str:
        """One more rate of a row; what was found, in words."""
        crossing = self.found[row.name]
        rate, began = float(f"{crossing.next_rate():.4g}"), time.perf_counter()
        figures = replace(row.study, jobs=jobs).at(rate)
        crossing.attained[rate] = figures.attainment
        self.took[row.name] = time.perf_counter() - began
        return f"{row.name}: {figures.attainment:.1%} at {rate:g} requests/s ({self.took[row.name]:.0f} s)"

    def measured(self) -> dict[str, dict[str, float]]:
        """Attained shares by rate, of each row by name."""
        return {
            name: {f"{rate:g}": share for rate, share in sorted(crossing.attained.items())}
            for name, crossing in self.found.items()
            if crossing.attained
        }


def first_rate(row: TableRow) -> float:
    """A guess, in requests a second."""
    plan = row.study.plan
    return FIRST_SHARE * len(plan.roles) / sum(seconds_each(row.study.traffic, plan.profile))


# ---- what is shown ---------------------------------------------------------------------------------------------------


def told(crossing: Crossing) -> str:
    """A goodput, or what is known of it."""
    if crossing.goodput is not None:
        return f"{crossing.goodput:.4g}" + ("" if crossing.over else f" ± {50 * crossing.width:.0f} %")
    if crossing.passing is not None:
        return f"> {crossing.passing:.4g}"
    return f"< {crossing.failing:.4g}" if crossing.failing is not None else "not run"


def policies_table(rows: Sequence[TableRow], found: Found) -> str:
    """Goodput by workload and fleet, a column for each policy, and how many times the baselines' the policy's is."""
    lines = [["workload", "workers", *POLICIES, "× round robin", "× least loaded"]]
    for workload, fleet in dict.fromkeys((row.workload, row.fleet) for row in rows):
        cells = [found[f"{workload} {fleet} {policy}"] for policy in POLICIES]
        ratios = [times(cells[0], other) for other in cells[1:]]
        lines.append([workload, fleet, *map(told, cells), *ratios])
    return aligned(lines, texts=2)


def others_table(rows: Sequence[TableRow], found: Found) -> str:
    """Everything that is no policy, beside the goodput policy on the same fleet."""
    lines = [["workload", "workers", "goodput policy", "goodput", "× of it as it is"]]
    for row in rows:
        if row.what not in POLICIES:
            whole = found[f"{row.workload} {row.fleet} goodput"]
            lines.append([row.workload, row.fleet, row.what, told(found[row.name]), times(found[row.name], whole)])
    return aligned(lines, texts=3)


def wanted_ratios(rows: Sequence[TableRow], found: Found) -> str:
    """What is asked of the policy, in a line each."""
    lines = [["", "", "is", "wanted"]]
    for workload in dict.fromkeys(row.workload for row in rows):
        auto, mixed, split = (found[f"{workload} {fleet} goodput"] for fleet in FLEETS)
        lines.append([workload, "auto / better of mixed and split", times(auto, mixed, split), "≥ 0.95"])
        if workload == BUDGETS_FOR:
            fixed = [found[row.name] for row in rows if row.what.startswith("fixed")]
            lines.append([workload, "chunks by slack / best fixed budget", times(mixed, *fixed), "≥ 1.20"])
            lines.append([workload, "split / best of mixed", times(split, mixed, *fixed), "> 1"])
    return aligned(lines, texts=2)


def times(one: Crossing, *others: Crossing) -> str:
    """How many times the largest of the others one is."""
    known = [other.goodput for other in others if other.goodput is not None]
    if one.goodput is None or len(known) < len(others):
        return "—"
    return f"{one.goodput / max(known):.2f}"


def show(table: GoodputTable) -> None:
    for made in (policies_table, others_table, wanted_ratios):
        print(f"\n{made(table.rows, table.found)}")


# ---- the command -----------------------------------------------------------------------------------------------------


def known_from(file: Path | None, workers: int, **settings: object) -> tuple[dict[str, dict[str, float]], float]:
    """What a file of this command says, and how many of our workers there are for each of its.

    Raises ValueError for one of as many workers that is of other `settings`: what it says was not measured with ours.
    """
    if file is None or not file.exists():
        return {}, 1.0
    read = orjson.loads(file.read_bytes())
    others = [f"--{name} {read[name]}" for name, ours in settings.items() if read.get(name, ours) != ours]
    if others and read["workers"] == workers:
        raise ValueError(f"{file} is of {', '.join(others)}: give the same, or another file")
    return read["attained"], workers / read["workers"]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.simulator.goodput_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=int, default=64, help="of each fleet (default: 64)")
    add("--minutes", type=float, default=20.0, help="about how long it may take (default: 20)")
    add("--workloads", default=",".join(WORKLOADS), metavar="NAME,…", help=f"(default: {','.join(WORKLOADS)})")
    add("--requests", type=int, metavar="N", help="for each rate and seed (default: 30 a worker, at least 300)")
    add("--seeds", type=int, default=3, metavar="N", help="(default: 3)")
    add("--jobs", type=int, default=3, metavar="N", help="processes beside each other (default: 3)")
    add("--profile", default="a100-opt13b", choices=PROFILES, help="of every worker (default: a100-opt13b)")
    add("--json", type=Path, metavar="FILE", help="what was measured; goes on from what is there")
    add("--from", type=Path, dest="begin", metavar="FILE", help="such a file of a smaller fleet: where to begin")
    options = parser.parse_args(arguments)
    if options.requests is None:
        options.requests = max(300, 30 * options.workers)
    for name, least in (("requests", 2), ("seeds", 1), ("jobs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: give at least {least}")
    if options.json is not None and options.json.exists():
        options.begin = options.json
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    over = time.perf_counter() + 60 * options.minutes
    profile, workloads = profile_of(options.profile), options.workloads.split(",")
    settings = {"profile": options.profile, "requests": options.requests, "seeds": options.seeds}
    try:
        rows = table_rows(profile, options.workers, workloads, options.requests, options.seeds)
        table = GoodputTable(rows, *known_from(options.begin, options.workers, **settings))
    except ValueError as error:
        print(f"goodput_table: {error}", file=sys.stderr)
        return 2
    with quiet_log():
        while (row := table.next_row(over - time.perf_counter())) is not None:
            print(table.measure(row, options.jobs), file=sys.stderr, flush=True)
            if options.json is not None:
                kept = {"workers": options.workers, **settings, "attained": table.measured()}
                options.json.write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2))
    print(f"{options.workers} workers, {profile.name}, {options.seeds} × {options.requests} requests a rate, at 90 %")
    show(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
