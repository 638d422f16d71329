"""Single requests of `python -m bench.simulated`, measured beside simulated: where a figure that is apart comes from.

    python -m scripts.simulated_requests PATH [PART]     PATH as --out there; PART of a run's name, as "split, chat"

It simulates each kept run once more, as that command does, and prints its requests in the order they came.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from bench.deployments import DEPLOYMENTS, PRELUDE_SECONDS, WARM_TEXTS
from bench.ledger import Ledger
from bench.own_simulator import simulator_flags
from bench.standings import table
from bench.step_traces import logs_of, steps_of
from deploy.cli import make_parser
from deploy.simulator.command import study_of
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.run import quiet_log, simulate

Row = Mapping[str, Any]


def pairs(ledger: Ledger, part: str, logs: Path, out: Path) -> Iterator[tuple[str, list[tuple[Row, RequestOutcome]]]]:
    """Of each run whose name has `part`: the counted requests as they were measured, and what is simulated of each.

    `logs` is where the command has kept the runs' steps, `out` the beginning of new files.
    """
    for note, kept in ledger.notes.items():
        name = note.removeprefix("run ")
        if name == note or part not in name:
            continue
        deployment = DEPLOYMENTS[name.partition(",")[0]]
        learned, steps = ledger.notes[f"learned {deployment.name}"], steps_of(logs, deployment, name)
        if "front_ms" not in learned:  # the command was killed before it knew: it learns that when it goes on
            continue
        flags = simulator_flags(deployment, learned, kept["profiles"], out, steps)
        rows = sorted(kept["rows"], key=lambda row: float(row["arrival_s"]))
        found = zip(rows, simulated(rows, flags), strict=True)
        yield name, [(row, outcome) for row, outcome in found if row["counted"]]


def simulated(rows: Sequence[Row], flags: Sequence[str]) -> list[RequestOutcome]:
    """In the order of arrival, which is that of the rows."""
    with TemporaryDirectory() as folder, quiet_log():
        trace = Path(folder) / "requests.jsonl"
        trace.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        options = make_parser().parse_args(["simulate", *flags, "--trace", str(trace)])
        study = study_of(options, options.policy)
        return simulate(study.plan, study.arriving(0), study.natural_rate).outcomes


def compared(found: Sequence[tuple[Row, RequestOutcome]]) -> str:
    """A table of the requests, and in a line how far both sides are apart in the median."""
    lines, apart = [], {"TTFT": list[float](), "TPOT": list[float]()}
    for row, outcome in found:
        cells = [f"{row['arrival_s'] - PRELUDE_SECONDS * WARM_TEXTS:.2f}", f"{row['prompt_tokens']}"]
        cells.append(f"{row['output_tokens']}")
        both = {"TTFT": (row["ttft_ms"], outcome.ttft), "TPOT": (row["tpot_ms"], outcome.tpot)}
        for name, (measured, seconds) in both.items():
            if measured is None or seconds is None:
                cells.append("—")
                continue
            apart[name].append(1e3 * seconds / measured - 1)
            cells.append(f"{measured:.1f} → {1e3 * seconds:.1f} ({apart[name][-1]:+.0%})")
        lines.append([*cells, row["error"] or "", outcome.error or ""])
    heads = ["second", "prompt", "output", "TTFT, ms", "TPOT, ms", "measured error", "simulated error"]
    told = [
        f"{name} {median(each):+.1%} in the median, {median(map(abs, each)):.1%} either way"
        for name, each in apart.items()
        if each
    ]
    return f"{table(heads, lines)}\n\n{'; '.join(told)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.simulated_requests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="as --out of bench.simulated")
    parser.add_argument("part", nargs="?", default="", help="of a run's name (all)")
    args = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        ledger = Ledger(args.path.with_suffix(".jsonl"))
        for name, found in pairs(ledger, args.part, logs_of(args.path), Path(folder) / "profiles"):
            print(f"\n{name}\n\n{compared(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
