"""The goodput router on real processes, in one sitting: against other policies, and mixed against split workers.

    python -m bench.goodput_lines --minutes 20                 chat, long-mixed and roles, on a quiet machine
    python -m bench.goodput_lines --cases chunks,ablation --minutes 40
    python -m bench.goodput_lines --paced --cases all --minutes 150    side by side, on workers of a given pace

It names comparisons of bench.policies and gives each its share of the time; it starts and measures nothing itself.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.policies import DONE, INTERRUPTED, UNUSABLE, add_arguments, compare, comparisons_of, options_of
from bench.premises import STEADY, Premises, premises
from bench.progress import say

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
USUAL, ALL = "chat,long-mixed,roles", "all"
SEARCH = "--first-share 1.0 --growth 1.15 --rate-tolerance 0.16 --warm-up 10"
"""A closed loop of six gives about what 90 % attain at, so that two neighbouring rates bracket it for most."""
REAL_FLAGS, REAL_SECONDS, PACED_SECONDS = "--quantization int8", 18.0, 60.0
PACED_RATES: Mapping[str, float] = {
    "chat": 2.66,
    "long-mixed": 1.52,
    "shared-prefix": 2.31,
    "roles": 1.75,
    "roles-chat": 4.05,
    "roles-shared-prefix": 3.06,
    "chunks": 1.15,
    "ablation": 1.15,
}
"""Where searches begin, in requests a second: about what is attained at on workers of that pace, on any machine."""


LANES = 3  # contenders of two workers, which leave two cores half of their time
WIDE_CASES, WIDE_LANES = ("long-mixed", "roles", "roles-chat", "roles-shared-prefix"), 2  # of three workers each


def arguments_of(case: str, options: argparse.Namespace) -> argparse.Namespace:
    """Of bench.policies, for one case. Raises ValueError."""
    if case not in CASES:
        raise ValueError(f"--cases {case}: there are {', '.join(CASES)}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    paced = options.paced
    given = options.serve_flags if options.serve_flags is not None else "" if paced else REAL_FLAGS
    seconds = options.seconds if options.seconds is not None else PACED_SECONDS if paced else REAL_SECONDS
    flags = [*shlex.split(CASES[case]), *shlex.split(SEARCH), f"--serve-flags={given}"]
    flags += ["--seconds", str(seconds), "--seeds", str(options.seeds)]
    flags += [] if options.slo_scale is None else ["--slo-scale", str(options.slo_scale)]
    lanes = options.lanes or (WIDE_LANES if case in WIDE_CASES else LANES)
    flags += ["--paced", "--lanes", str(lanes), "--rate", str(PACED_RATES[case])] if paced else []
    return parser.parse_args([*flags, "--out", f"{options.out}-{case}"])


async def sit(options: argparse.Namespace, on: Premises | None = None) -> int:
    """One case after the other, each with an equal share of the time that is left; the worst exit status of all."""
    cases, worst = list(CASES) if options.cases == ALL else options.cases.split(","), DONE
    planned = [arguments_of(case, options) for case in cases]
    clock = asyncio.get_running_loop().time
    over = clock() + 60 * options.minutes
    for number, args in enumerate(planned):
        args.budget_minutes = max(0.01, (over - clock()) / 60 / (len(planned) - number))
        worst = max(worst, await compare(options_of(args), comparisons_of(args), on))
        if worst == INTERRUPTED:
            break
    return worst


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput_lines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default=USUAL, metavar="LIST", help=f"of {', '.join(CASES)}, or {ALL} ({USUAL})")
    add("--minutes", type=float, default=20.0, metavar="M", help="begin no run after that (20)")
    add("--paced", action="store_true", help="steps last as a step cost says, and contenders run side by side")
    add(
        "--lanes",
        type=int,
        metavar="N",
        help=f"paced contenders at the same time ({LANES}; of three workers {WIDE_LANES})",
    )
    told = f"of arrivals in a run ({REAL_SECONDS:g}; paced: {PACED_SECONDS:g})"
    add("--seconds", type=float, metavar="S", help=told)
    add("--seeds", type=int, default=3, metavar="N", help="runs that a rate is judged by (3)")
    told = "multiplies every objective: slower machines need it (1; paced: 3)"
    add("--slo-scale", type=float, metavar="X", help=told)
    add("--serve-flags", metavar="FLAGS", help=f"of every server ({REAL_FLAGS}; paced: none)")
    add("--out", type=Path, default=Path("bench-goodput"), metavar="PATH", help="beginning of files (bench-goodput)")
    return parser


def main() -> int:
    """Run the command; the process's exit status."""
    try:
        options = make_parser().parse_args()
        with premises(STEADY if options.paced else None) as on:
            return asyncio.run(sit(options, on))
    except (ValueError, OSError) as error:
        say(f"bench.goodput_lines: {error}")
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
