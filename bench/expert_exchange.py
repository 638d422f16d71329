"""Times dispatch and combine of MoE rows between processes of this host: shared memory beside gloo.

Run `python -m bench.expert_exchange`. A round is one dispatch and one combine of every rank, with routing drawn evenly
over all experts. `gloo` is what the bytes alone cost there: two `all_to_all_single` a round of as many bytes as the
shared memory's round puts on the wire, without routing, quantization or sorting. The two take turns. `over gloo` is the
whole exchange. CPU time is that of rank 0's process, which other work on the host changes less.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench.expert_rank import Case, Measured, run_rank
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
    "ranks", "tokens a rank", "wire", "a row", "dispatch µs", "round µs", "p99 µs", "GB/s, all ranks", "gloo µs",
    "gloo p99", "of gloo", "CPU µs, exchange / gloo", "of gloo's CPU", "over gloo µs",
    "allocated: Python / heap / torch",
)  # fmt: skip


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
    args = parser.parse_args()
    print(line(HEADER))
    print(line(["---"] * len(HEADER)))
    for ranks in args.ranks:
        for wire in args.wire:
            for tokens in args.tokens:
                there, back = wire.split(":")
                case = Case(ranks, tokens, args.hidden, there, back, args.rounds, args.turns)
                print(line(row_of(case, run_case(case))), flush=True)


if __name__ == "__main__":
    main()
