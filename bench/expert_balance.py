"""How evenly experts are placed, what following a drift costs, and what moving experts does to steps that go on.

Run `python -m bench.expert_balance`. The first two tables are computed: 256 experts in 320 slots, loads by Zipf's law.
The third is measured: processes of this host compute steps of a model whose routers begin to prefer other experts after
a third of them, once with experts that move and once with experts that stay.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.balance_rank import INTERVAL, LiveCase, LiveMeasured, run_rank
from bench.rank_processes import run_ranks
from serving.model.expert_balance import Layout, placed, replaced

EXPERTS, SLOTS, SKEWS = 256, 320, (0.8, 1.0)
MOST_MOVES, TARGET = 25, 1.05
STEPS = 300


def zipf(exponent: float, seed: int, experts: int = EXPERTS) -> list[float]:
    loads = [1 / (place + 1) ** exponent for place in range(experts)]
    random.Random(seed).shuffle(loads)
    return loads


def heaviest_copy(loads: Sequence[float], slots: int) -> float:
    """The least that the heaviest copy can have: spare slots go, one by one, to the expert of most load a copy."""
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        copies[max(range(len(loads)), key=lambda expert: loads[expert] / copies[expert])] += 1
    return max(load / count for load, count in zip(loads, copies, strict=True))


def without_copies(loads: Sequence[float], ranks: int) -> float:
    """Max over mean where no expert has a copy: the heaviest first, each to the lightest rank with room."""
    filled, room = [0.0] * ranks, [SLOTS // ranks] * ranks
    for load in sorted(loads, reverse=True):
        rank = min((rank for rank in range(ranks) if room[rank]), key=lambda rank: filled[rank])
        filled[rank] += load
        room[rank] -= 1
    return max(filled) * ranks / sum(loads)


def placements_table(rank_counts: Sequence[int]) -> Iterator[list[str]]:
    yield ["s", "ranks", "slots a rank", "max/mean", "least there can be", "without copies"]
    for exponent in SKEWS:
        for ranks in rank_counts:
            loads = zipf(exponent, 1)
            found = placed(loads, Layout(ranks=ranks, slots=SLOTS // ranks)).imbalance(loads)
            floor = max(1.0, heaviest_copy(loads, SLOTS) * ranks / sum(loads))
            cells = (found, floor, without_copies(loads, ranks))
            yield [f"{exponent}", f"{ranks}", f"{SLOTS // ranks}", *(f"{cell:.3f}" for cell in cells)]


def drift_table(ranks: int, seeds: int) -> Iterator[list[str]]:
    yield ["s", "left as it was", "moves", "max/mean after them", "placed from nothing: moves", "max/mean"]
    layout = Layout(ranks=ranks, slots=SLOTS // ranks)
    for exponent in SKEWS:
        rows = []
        for seed in range(seeds):
            loads = zipf(exponent, seed)
            chance = random.Random(1000 + seed)
            now = [load * chance.lognormvariate(0, 0.2) for load in loads]
            old = placed(loads, layout)
            new, anew = replaced(old, now, most_moves=MOST_MOVES, target=TARGET), placed(now, layout)
            rows.append(
                (old.imbalance(now), new.moves_from(old), new.imbalance(now), anew.moves_from(old), anew.imbalance(now))
            )
        stale, moves, after, all_moves, best = zip(*rows, strict=True)
        yield [
            f"{exponent}",
            f"{min(stale):.2f}–{max(stale):.2f}",
            f"{min(moves)}–{max(moves)}, median {statistics.median(moves):g}",
            f"{min(after):.3f}–{max(after):.3f}",
            f"{min(all_moves)}–{max(all_moves)}",
            f"{max(best):.3f}",
        ]


def run_live(case: LiveCase) -> list[LiveMeasured]:
    """What each rank has measured."""
    return run_ranks(case.ranks, run_rank, case)


def most_over_budget(found: LiveMeasured, case: LiveCase) -> float:
    """The most bytes that came in within any second, as a share of what the budget allows then."""
    spent = sorted(found.spent)
    most, first, held = 0, 0, 0
    for when, size in spent:
        held += size
        while spent[first][0] < when - 1.0:
            held -= spent[first][1]
            first += 1
        most = max(most, held)
    return most / (case.bytes_per_second + (1 << 20))


def mean_imbalance(answers: Sequence[LiveMeasured], steps: slice) -> float:
    """Of these steps together, in the mean of all layers: the busiest rank's rows over the mean rank's."""
    of_ranks = [torch.tensor(one.loads[steps], dtype=torch.float32).sum(0) for one in answers]  # [layers, ranks] each
    loads = torch.stack(of_ranks).sum(0)
    return float((loads.amax(-1) / loads.mean(-1)).mean())


def steps_of(answers: Sequence[LiveMeasured], case: LiveCase) -> list[float]:
    """Milliseconds of each step's slowest rank, but for the first ones, in which memory is first touched."""
    each = zip(*(one.seconds for one in answers), strict=True)
    return [1e3 * max(step) for step in list(each)[INTERVAL // 2 : case.steps]]


def moving_steps(answers: Sequence[LiveMeasured]) -> set[int]:
    """The steps during which weights came in anywhere, and those that began with a switch."""
    first = answers[0]
    times = [when for one in answers for when, _ in one.spent]
    copied = {
        step
        for step, (began, took) in enumerate(zip(first.began, first.seconds, strict=True))
        if any(began <= when <= began + took for when in times)
    }
    switched = {step for step in range(1, len(first.switched)) if first.switched[step] > first.switched[step - 1]}
    return copied | switched


def cpu_cell(answers: Sequence[LiveMeasured]) -> str:
    """Of the threads that compute, which other processes on the host slow down little."""
    each = [1e3 * spent for one in answers for spent in one.cpu_seconds[INTERVAL // 2 :]]
    return f"{statistics.median(each):.1f} / {max(each):.1f}"


def live_table(cases: Sequence[LiveCase]) -> Iterator[list[str]]:
    yield [
        "ranks", "experts", "median ms", "longest ms", "of the median", "moving steps", "their longest",
        "CPU ms, median / longest",
        "begin_step, longest ms", "slots moved", "MB in a rank", "most of the budget", "max/mean after the drift",
        "at the end", "same bits",
    ]  # fmt: skip
    for case in cases:
        still = run_live(replace(case, moving=False))
        for name, answers in (("stay", still), ("move", run_live(case))):
            steps, moving = steps_of(answers, case), moving_steps(answers)
            median = statistics.median(steps)
            ms = [1e3 * max(step) for step in zip(*(one.seconds for one in answers), strict=True)]
            drift = case.steps // 3
            same = all(one.digests == other.digests for one, other in zip(answers, still, strict=True))
            yield [
                f"{case.ranks}", name, f"{median:.1f}", f"{max(steps):.1f}", f"{max(steps) / median:.2f}",
                f"{len(moving)}", f"{max((ms[step] for step in moving), default=0.0):.1f}",
                cpu_cell(answers),
                f"{1e3 * max(one.status.switch_seconds for one in answers):.2f}",
                f"{sum(one.status.slots for one in answers)}",
                f"{max(one.status.bytes for one in answers) / 1e6:.0f}",
                f"{100 * max(most_over_budget(one, case) for one in answers):.0f} %",
                f"{mean_imbalance(answers, slice(drift, drift + INTERVAL)):.2f}",
                f"{mean_imbalance(answers, slice(-INTERVAL, None)):.2f}",
                "yes" if same else "NO",
            ]  # fmt: skip


def lines(title: str, rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"\n## {title}\n"
    for number, cells in enumerate(rows):
        yield "| " + " | ".join(cells) + " |"
        if number == 0:
            yield "| " + " | ".join(["---"] * len(cells)) + " |"


def report(args: argparse.Namespace) -> Iterator[str]:
    yield "# Balance of experts over ranks"
    load = ", ".join(f"{one:.0f}" for one in os.getloadavg())
    host = f"{os.cpu_count()} CPUs with load averages of {load}, Linux {platform.release()}, torch {torch.__version__}"
    yield f"\n`python -m bench.expert_balance`; {host}."
    yield from lines("Placements of 256 experts in 320 slots", placements_table([8, 16, 32, 64, 160, 320]))
    yield from lines("After a drift (lognormal, 0.2), 32 ranks", drift_table(32, args.seeds))
    cases = [LiveCase(ranks, args.steps, moving=True, bytes_per_second=args.megabytes * 1e6) for ranks in args.ranks]
    yield from lines("Experts that move while steps go on", live_table(cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="processes of the measured part")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--megabytes", type=float, default=1.0, help="of weights a second that a rank may copy")
    parser.add_argument("--seeds", type=int, default=20, help="drifts in the second table")
    parser.add_argument("--out", type=Path, help="a file that gets the tables too")
    args = parser.parse_args()
    written = []
    for line in report(args):
        print(line, flush=True)
        written.append(line)
    if args.out is not None:
        args.out.write_text("\n".join(written) + "\n")


if __name__ == "__main__":
    main()
