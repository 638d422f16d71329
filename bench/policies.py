"""Goodput of routing policies, fleets and settings of this checkout, and of peers, on real processes.

    python -m bench.policies                                      the four policies on two mixed workers
    python -m bench.policies --preset modes,chunks,ablation --budget-minutes 120
    python -m bench.policies --contender 'ours=--mixed 2 --routing-policy goodput' --url vllm=http://127.0.0.1:8811

All servers of a comparison are up together and take turns: each run is one rate and one seed on one of them, arrivals
are Poisson and the same for all, stretched to the rate. Every run is kept at once, so that the same command goes on
where an earlier one was ended. It starts servers and sends to them; what their runs amount to is bench.race's matter.

With --paced a step computes a small model and then sleeps until it has lasted as long as a step cost says
(scripts.paced). All else is real, and no server takes another's cores, so that several are measured at the same time
(bench.side_by_side). The tables say how busy the machine was, and how much longer steps lasted: both are to be small.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.contenders import PRESETS, Contender, of_policies, parse_contender, parse_fleet, parse_peer
from bench.mixture import MIXTURES, mixture_of
from bench.premises import STEADY, Premises, premises
from bench.progress import say
from bench.referee import Comparison, ComparisonOptions, Referee
from bench.side_by_side import LaneReferee
from bench.sitting import BASE_FLAGS

DONE, WITH_ERRORS, UNUSABLE, INTERRUPTED = 0, 1, 2, 130  # exit statuses
PACED_FLAGS = ("--kernels", "torch", "--dtype", "float32")  # as bench.simulated serves that model
PACED_SCALE = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who is compared").add_argument
    add("--preset", default="", metavar="LIST", help=f"comparisons, of {', '.join(PRESETS)} (policies)")
    add("--policies", default="", metavar="LIST", help="or these routing policies")
    add("--fleet", action="append", default=[], metavar="[NAME:]mixed=2", help="on these workers; may be repeated")
    add("--contender", action="append", default=[], metavar="NAME=FLAGS", help="or a server of ours with these flags")
    add("--url", action="append", default=[], metavar="NAME=URL", help="beside them a server that runs already")
    add("--only", default="", metavar="LIST", help="contenders by name; the others are left out")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of every server of ours")
    add("--paced", action="store_true", help="steps last as a step cost says, and servers are measured side by side")
    add("--lanes", type=int, default=3, metavar="N", help="paced servers that are measured at the same time (3)")
    add = parser.add_argument_group("what is asked of them").add_argument
    add("--workloads", default=",".join(MIXTURES), metavar="LIST", help="(all)")
    add("--slo-scale", type=float, metavar="X", help=f"multiplies every objective (1; paced: {PACED_SCALE:g})")
    add("--seconds", type=float, default=30.0, metavar="S", help="of arrivals in a run (30)")
    add("--seeds", type=int, default=3, metavar="N", help="runs that a rate is judged by (3)")
    add("--attainment", type=float, default=0.9, metavar="X", help="share that must meet both objectives (0.9)")
    add("--rate-tolerance", type=float, default=0.05, metavar="X", help="how fine the search is (0.05)")
    add("--rate", type=float, metavar="R", help="the first rate (see --first-share)")
    add("--first-share", type=float, default=0.7, metavar="X", help="of a closed loop's rate, to begin with (0.7)")
    add("--growth", type=float, default=1.3, metavar="X", help="factor between rates until one fails (1.3)")
    add(
        "--warm-up", type=float, default=15.0, metavar="S", help="seconds of requests that each server learns from (15)"
    )
    add = parser.add_argument_group("limits and output").add_argument
    add("--at-once", type=int, default=6, metavar="N", help="servers up together; more are compared in groups (6)")
    add("--budget-minutes", type=float, default=math.inf, metavar="M", help="begin no run after that (no limit)")
    add("--out", type=Path, default=Path("bench-policies"), metavar="PATH", help="beginning of files (bench-policies)")


def comparisons_of(args: argparse.Namespace) -> list[Comparison]:
    """What the flags ask for: each preset over each workload, workloads first. Raises ValueError."""
    groups: dict[str, tuple[Contender, ...]] = {}
    for name in filter(None, args.preset.split(",")):
        if name not in PRESETS:
            raise ValueError(f"--preset {name}: there are {', '.join(PRESETS)}")
        groups[name] = PRESETS[name]
    own = [parse_contender(text) for text in args.contender]
    if args.policies or args.fleet:
        fleets = [parse_fleet(text) for text in args.fleet or ["mixed=2"]]
        own = of_policies((args.policies or "goodput").split(","), fleets) + own
    if own:
        groups["chosen"] = tuple(own)
    peers = tuple(parse_peer(text) for text in args.url)
    if not groups:
        groups = {"policies": PRESETS["policies"]} if not peers else {"peers": ()}
    only = set(filter(None, args.only.split(",")))
    found = []
    for workload in args.workloads.split(","):
        mixture = mixture_of(workload).scaled(scale_of(args))
        for name, members in groups.items():
            chosen = tuple(one for one in (*members, *peers) if not only or one.name in only)
            if len({one.name for one in chosen}) < len(chosen) or not chosen:
                raise ValueError("contenders need names of their own, and there must be some")
            settings = f"{args.seconds:g} s {args.serve_flags} x{scale_of(args):g} {mixture.describe()}"
            settings = f"paced {settings}" if args.paced else settings
            groups_of = [chosen] if args.paced else in_groups(chosen, args.at_once)
            for number_, group in enumerate(groups_of, 1):
                title = f"{name} {number_}" if len(groups_of) > 1 else name
                case = f"{title}, {workload}, {settings}"
                found.append(Comparison(name=title, case=case, mixture=mixture, contenders=group))
    return found


def scale_of(args: argparse.Namespace) -> float:
    """What objectives are multiplied by: as asked for, else so that a paced step is well within the tightest TPOT."""
    if args.slo_scale is not None:
        return float(args.slo_scale)
    return PACED_SCALE if args.paced else 1.0


def in_groups(contenders: tuple[Contender, ...], at_once: int) -> list[tuple[Contender, ...]]:
    """At most `at_once` in each, the first in all. Raises ValueError."""
    if at_once < 2:
        raise ValueError("--at-once must be at least 2")
    first, rest = contenders[:1], contenders[1:]
    starts = range(0, max(1, len(rest)), at_once - 1)
    return [(*first, *rest[start : start + at_once - 1]) for start in starts]


def options_of(args: argparse.Namespace) -> ComparisonOptions:
    """Raises ValueError."""
    for name in ("seconds", "warm_up", "budget_minutes", "slo_scale", "seeds", "first_share", "lanes"):
        given = getattr(args, name)
        if given is not None and not given > 0:
            raise ValueError(f"--{name.replace('_', '-')} {given:g}: must be positive")
    if args.paced and args.url:
        raise ValueError("--paced --url: a server that runs already has a pace of its own")
    return ComparisonOptions(
        out=args.out,
        base=(*BASE_FLAGS, *(PACED_FLAGS if args.paced else ()), *shlex.split(args.serve_flags)),
        seconds=args.seconds,
        seeds=args.seeds,
        goal=args.attainment,
        tolerance=args.rate_tolerance,
        warm_up=args.warm_up,
        start=args.rate,
        until=time.monotonic() + 60 * args.budget_minutes,
        first_share=args.first_share,
        growth=args.growth,
        lanes=args.lanes,
    )


async def compare(options: ComparisonOptions, comparisons: Sequence[Comparison], on: Premises | None = None) -> int:
    """Make them, by turns, or side by side `on` a pace; the exit status."""
    referee = Referee(options, on) if on is None or on.pace is None else LaneReferee(options, on)
    gc.freeze()  # what is loaded by now: no collection looks at it while tokens come
    with contextlib.suppress(NotImplementedError, RuntimeError):
        for number_ in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number_, referee.interrupted.set)
    await referee.run(comparisons)
    say(f"wrote {options.out}.md, .json and .jsonl")
    return INTERRUPTED if referee.interrupted.is_set() else WITH_ERRORS if referee.failed else DONE


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        args = parser.parse_args()
        options, comparisons = options_of(args), comparisons_of(args)
        with premises(STEADY if args.paced else None) as on:
            return asyncio.run(compare(options, comparisons, on))
    except (ValueError, OSError) as error:
        say(f"bench.policies: {error}")
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
