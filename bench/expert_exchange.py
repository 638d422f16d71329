"""Times dispatch and combine of MoE rows between processes of this host: shared memory beside gloo.

Run `python -m bench.expert_exchange`. A round is one dispatch and one combine of every rank, with routing drawn evenly
over all experts. `gloo` is what the bytes alone cost there: two `all_to_all_single` a round of as many bytes as the
shared memory's round puts on the wire, without routing, quantization or sorting. The two take turns. `over gloo` is the
whole exchange. CPU time is that of rank 0's process, which other work on the host changes less.

INT8 rows are computed with where they lie; `gathered` is a round that copies them to one place first, as float rows
always are. With `--experts-width` INT8 experts of that width compute in each round, both ways: what a copy costs, or
saves, in both together.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

from bench.expert_rank import Case, Measured, run_experts, run_rank
from bench.rank_processes import run_ranks


def run_case(case: Case) -> dict[str, Any]:
    """What rank 0 has measured."""
    first: dict[str, Any] = run_ranks(case.ranks, run_rank, case)[0]
    return first


def row_of(case: Case, found: dict[str, Any]) -> list[str]:
    shared: Measured = found["shared"]
    median = statistics.median(shared.seconds)
    gloo, over = statistics.median(found["gloo"]), statistics.median(found["over"].seconds)
    sent, kept = shared.traffic, found["allocated"]
    all_bytes = sent.dispatch_bytes + sent.routing_bytes + sent.combine_bytes
    return [
        f"{case.ranks}",
        f"{case.tokens}",
        f"{case.wire}, {case.back} back",
        f"{sent.dispatch_bytes / max(sent.rows, 1):,.0f} B",
        f"{statistics.median(shared.dispatch_seconds) * 1e6:,.0f}",
        f"{median * 1e6:,.0f}",
        f"{statistics.median(found['gathered'].seconds) * 1e6:,.0f}",
        f"{tail(shared.seconds) * 1e6:,.0f}",
        f"{case.ranks * all_bytes / median / 1e9:.2f}",
        f"{gloo * 1e6:,.0f}",
        f"{tail(found['gloo']) * 1e6:,.0f}",
        f"{median / gloo:.2f}",
        f"{shared.cpu_seconds * 1e6:,.0f} / {found['gloo cpu'] * 1e6:,.0f}",
        f"{shared.cpu_seconds / found['gloo cpu']:.2f}",
        f"{over * 1e6:,.0f}",
        f"{kept.python} / {kept.heap} / {kept.torch}",
    ]


def tail(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


HEADER = (
    "ranks", "tokens a rank", "wire", "a row", "dispatch µs", "round µs", "gathered µs", "p99 µs", "GB/s, all ranks",
    "gloo µs", "gloo p99", "of gloo", "CPU µs, exchange / gloo", "of gloo's CPU", "over gloo µs",
    "allocated: Python / heap / torch",
)  # fmt: skip


EXPERTS_HEADER = (
    "ranks", "tokens a rank", "experts' width", "in place: round ms", "p99 ms", "CPU ms", "gathered: round ms",
    "p99 ms", "CPU ms", "in place / gathered", "of CPU",
)  # fmt: skip


def experts_row(case: Case) -> list[str]:
    """Of rank 0, as it has measured rounds in which experts compute."""
    both: list[Measured] = run_ranks(case.ranks, run_experts, case)[0]
    cells = [f"{case.ranks}", f"{case.tokens}", f"{case.width}"]
    for one in both:
        times = statistics.median(one.seconds), tail(one.seconds), one.cpu_seconds
        cells += [f"{1e3 * seconds:.2f}" for seconds in times]
    in_place, gathered = (statistics.median(one.seconds) for one in both)
    return [*cells, f"{in_place / gathered:.3f}", f"{both[0].cpu_seconds / both[1].cpu_seconds:.3f}"]


def line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64], help="rows of each rank in a round")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument(
        "--wire", nargs="+", default=["int8:bf16", "bf16:bf16"], help="rows:results, of int8, bf16, f32"
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10, help="in which the exchange and gloo compute these rounds")
    parser.add_argument("--experts-width", type=int, default=0, help="instead: rounds with INT8 experts of this width")
    args = parser.parse_args()
    header = EXPERTS_HEADER if args.experts_width else HEADER
    print(line(header))
    print(line(["---"] * len(header)))
    if args.experts_width:
        for ranks, tokens in itertools.product(args.ranks, args.tokens):
            sizes = (ranks, tokens, args.hidden, "int8", "bf16", args.rounds, args.turns, args.experts_width)
            print(line(experts_row(Case(*sizes))), flush=True)
        return
    for ranks in args.ranks:
        for wire in args.wire:
            for tokens in args.tokens:
                there, back = wire.split(":")
                case = Case(ranks, tokens, args.hidden, there, back, args.rounds, args.turns)
                print(line(row_of(case, run_case(case))), flush=True)


if __name__ == "__main__":
    main()
