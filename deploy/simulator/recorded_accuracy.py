"""Holds replays of recorded systems against their runs; and what is fitted to all runs but one against that one.

    python -m deploy.simulator.recorded_accuracy ../shared/data/a100-opt13b-sharegpt --leave-one-out

It prints Markdown. Time is virtual: what else the machine does changes no figure. All of it took 13
minutes on a machine with a load of 25.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from deploy.simulator.outcomes import OutcomeColumns, figures
from deploy.simulator.profiles import PhaseTables
from deploy.simulator.recorded_replay import replay
from deploy.simulator.recorded_systems import SYSTEMS, ColocatedSystem, RecordedSystem, SplitSystem
from deploy.simulator.trace_files import as_arrivals, natural_rate, read_trace
from serving.messages import Slo

LIMITS = (250.0, 100.0)  # ms, TTFT and TPOT
STEPS = (0.75, 1.0, 1.25)  # of each of two constants, tried for every run that is left out
FAMILIES = {"distserve": ("distserve-c21d11", "distserve-c21d12"), "vllm": ("vllm-tp1",)}


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Attainment in points, p90s in ms."""

    attained: float
    ttft: float
    tpot: float

    def misses(self, real: RunFigures) -> float:
        """What a fit makes small: points of attainment, and ten for each factor of e in a p90."""
        factors = abs(np.log(self.ttft / real.ttft)) + abs(np.log(self.tpot / real.tpot))
        return abs(self.attained - real.attained) + 10 * float(factors)


def measured(path: Path) -> RunFigures:
    ttft, tpot = (np.array([getattr(each, name) for each in read_trace(path)]) for name in ("ttft_ms", "tpot_ms"))
    attained = 100 * np.mean((ttft <= LIMITS[0]) & (tpot <= LIMITS[1]))
    return RunFigures(float(attained), float(np.quantile(ttft, 0.9)), float(np.quantile(tpot, 0.9)))


@cache
def simulated(system: RecordedSystem, path: Path) -> RunFigures:
    traced = read_trace(path)
    rate = natural_rate(traced)
    run = replay(system, as_arrivals(traced, Slo(ttft_ms=LIMITS[0], tpot_ms=LIMITS[1])), rate)
    found = figures(rate, [OutcomeColumns(run.outcomes)])
    return RunFigures(100 * found.attainment, found.ttft_p90, found.tpot_p90)


def system_of(path: Path) -> str:
    return next((name for name in SYSTEMS if path.name.startswith(name)), "vllm-tp1")


def variants(name: str) -> Iterator[RecordedSystem]:
    """The system with two of its fitted constants at each of STEPS: what a sequence costs, and what a prompt does."""
    system = SYSTEMS[name]
    for sequence, prompt in product(STEPS, STEPS):
        if isinstance(system, SplitSystem):
            moved = system.move_token_seconds * prompt
            yield replace(system, handling=system.handling * sequence, move_token_seconds=moved)
        else:
            yield slower(system, sequence, prompt)


def slower(system: ColocatedSystem, sequence: float, prompt: float) -> ColocatedSystem:
    steps = system.engine.steps
    assert isinstance(steps, PhaseTables)
    steps = replace(steps, sequence_ms=steps.sequence_ms * sequence, prompt_ms=steps.prompt_ms * prompt)
    return replace(system, engine=replace(system.engine, steps=steps))


def fitted_without(left_out: Path, paths: Sequence[Path]) -> RecordedSystem:
    """Of the variants the one that misses the other runs of the family least."""
    name = system_of(left_out)
    family = next(members for members in FAMILIES.values() if name in members)
    others = [path for path in paths if path != left_out and system_of(path) in family]
    misses = [0.0] * len(STEPS) ** 2
    for path in others:
        for number, variant in enumerate(variants(system_of(path))):
            misses[number] += simulated(variant, path).misses(measured(path))
    return list(variants(name))[int(np.argmin(misses))]


def table(paths: Sequence[Path], system: Callable[[Path], RecordedSystem]) -> str:
    """A row a run, and the mean error of each system's attainment."""
    lines = [
        "| run | attained | simulated | TTFT p90, ms | simulated | TPOT p90, ms | simulated |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {}
    for path in paths:
        real, found = measured(path), simulated(system(path), path)
        errors.setdefault(system_of(path), []).append(abs(found.attained - real.attained))
        cells = [f"{real.attained:.1f} %", f"{found.attained:.1f} %"]
        for of_real, of_found in ((real.ttft, found.ttft), (real.tpot, found.tpot)):
            cells += [f"{of_real:.0f}", f"{of_found:.0f} ({of_found / of_real - 1:+.0%})"]
        lines.append(f"| {path.stem} | {' | '.join(cells)} |")
    means = ", ".join(f"{name} {np.mean(found):.1f}" for name, found in errors.items())
    return "\n".join(lines) + f"\n\nMean error of attainment, points: {means}."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.simulator.recorded_accuracy", description=__doc__)
    parser.add_argument("folder", type=Path, help="traces as CSV, named after their systems")
    parser.add_argument("--leave-one-out", action="store_true", help="also fit to all runs but one, for each")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.csv"))
    print(table(paths, lambda path: SYSTEMS[system_of(path)]), flush=True)
    if options.leave_one_out:
        print("\nFitted to the others:\n\n" + table(paths, lambda path: fitted_without(path, paths)))


if __name__ == "__main__":
    main()
