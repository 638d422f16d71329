"""The goodput router on real processes, in one sitting: against other policies, and mixed against split workers.

    python -m bench.goodput_lines --minutes 20                 chat, long-mixed and roles, on a quiet machine
    python -m bench.goodput_lines --cases chunks,ablation --minutes 40

It names comparisons of bench.policies and gives each its share of the time; it starts and measures nothing itself.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.policies import DONE, INTERRUPTED, UNUSABLE, add_arguments, compare, comparisons_of, options_of, say

RIVALS = "--policies goodput,least_loaded,round_robin"
CASES: Mapping[str, str] = {
    "chat": f"--workloads chat --fleet mixed=2 {RIVALS}",
    "long-mixed": f"--workloads long-mixed --fleet mixed=1,prefill=1,decode=1 {RIVALS}",
    "shared-prefix": f"--workloads shared-prefix --fleet mixed=2 {RIVALS}",
    "roles": "--workloads long-mixed --preset roles",
    "roles-chat": "--workloads chat --preset roles",
    "roles-shared-prefix": "--workloads shared-prefix --preset roles",
    "chunks": "--workloads long-mixed --preset chunks",
    "ablation": "--workloads long-mixed --preset ablation",
}
USUAL = "chat,long-mixed,roles"
SEARCH = "--first-share 1.0 --growth 1.15 --rate-tolerance 0.16 --warm-up 10"
"""A closed loop of six gives about what 90 % attain at, so that two neighbouring rates bracket it for most."""


def arguments_of(case: str, options: argparse.Namespace) -> argparse.Namespace:
    """Of bench.policies, for one case. Raises ValueError."""
    if case not in CASES:
        raise ValueError(f"--cases {case}: there are {', '.join(CASES)}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = [*shlex.split(CASES[case]), *shlex.split(SEARCH), f"--serve-flags={options.serve_flags}"]
    flags += ["--seconds", str(options.seconds), "--seeds", str(options.seeds), "--slo-scale", str(options.slo_scale)]
    return parser.parse_args([*flags, "--out", f"{options.out}-{case}"])


async def sit(options: argparse.Namespace) -> int:
    """One case after the other, each with an equal share of the time that is left; the worst exit status of all."""
    cases, worst = options.cases.split(","), DONE
    planned = [arguments_of(case, options) for case in cases]
    clock = asyncio.get_running_loop().time
    over = clock() + 60 * options.minutes
    for number, args in enumerate(planned):
        args.budget_minutes = max(0.01, (over - clock()) / 60 / (len(planned) - number))
        worst = max(worst, await compare(options_of(args), comparisons_of(args)))
        if worst == INTERRUPTED:
            break
    return worst


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput_lines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default=USUAL, metavar="LIST", help=f"of {', '.join(CASES)} ({USUAL})")
    add("--minutes", type=float, default=20.0, metavar="M", help="begin no run after that (20)")
    add("--seconds", type=float, default=18.0, metavar="S", help="of arrivals in a run (18)")
    add("--seeds", type=int, default=3, metavar="N", help="runs that a rate is judged by (3)")
    add(
        "--slo-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiplies every objective: slower machines need it (1)",
    )
    add("--serve-flags", default="--quantization int8", metavar="FLAGS", help="of every server (--quantization int8)")
    add("--out", type=Path, default=Path("bench-goodput"), metavar="PATH", help="beginning of files (bench-goodput)")
    return parser


def main() -> int:
    """Run the command; the process's exit status."""
    try:
        return asyncio.run(sit(make_parser().parse_args()))
    except (ValueError, OSError) as error:
        say(f"bench.goodput_lines: {error}")
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
