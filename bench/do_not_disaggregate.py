"""A workload for which splitting prompts from decode steps does not pay: as planned, and as measured on this machine.

    python -m bench.do_not_disaggregate --minutes 8

Two workers, of a thread each: both mixed, or one for prompts and one for decode steps. Prompts are short and answers
long, so that a prefill worker has little to do. A worker of this checkout is profiled under the workload, `millrace
plan` looks for the best placement on two such devices, and then the goodput of both is measured on real processes
(bench.policies): 90 % of the requests within TTFT and TPOT. The same command goes on where an earlier one was ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bench.contenders import Contender
from bench.endpoint import ServerError
from bench.mixture import Mixture, RequestKind
from bench.own_server import commit
from bench.own_simulator import command, model_sizes, write_profile
from bench.policies import INTERRUPTED, UNUSABLE, compare
from bench.progress import say
from bench.referee import Comparison, ComparisonOptions
from bench.report import number
from bench.sitting import BASE_FLAGS, open_server, warm_up
from bench.standings import table
from bench.summary import SloTargets

HEARTBEAT_SECONDS = 1.0  # of `millrace serve`
PROFILED = Contender(name="profiled", flags=("--mixed", "1"))
GOODPUT = ("--routing-policy", "goodput")
FLEETS: Mapping[str, Contender] = {
    "aggregated": Contender(name="2 mixed", flags=("--mixed", "2", *GOODPUT)),
    "split": Contender(name="1 prefill + 1 decode", flags=("--prefill", "1", "--decode", "1", *GOODPUT)),
}
WORKERS = {"aggregated": {"mixed": 2}, "split": {"prefill": 1, "decode": 1}}  # as a plan tells them
GOAL, TOLERANCE, GROWTH = 0.9, 0.25, 1.5  # of the search: two rates so far apart bracket an answer
EVEN = 0.03  # a ratio within it says that neither is better


def mixture_of(args: argparse.Namespace) -> Mixture:
    slo = SloTargets(ttft_ms=args.ttft_ms, tpot_ms=args.tpot_ms)
    kind = RequestKind(
        name="answers", prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens, spread=args.spread, slo=slo
    )
    return Mixture(name="short prompts, long answers", kinds=(kind,))


def question(mixture: Mixture, profile: Path) -> str:
    """The plan's file: this workload on two devices like the profiled worker's."""
    (kind,) = mixture.kinds
    return f"""[model]
profile = {json.dumps(str(profile))}
[hardware]
devices_per_node = 2
[traffic]
prompt_mean = {kind.prompt_tokens}
prompt_spread = {kind.spread}
output_mean = {kind.output_tokens}
output_spread = {kind.spread}
[objectives]
ttft_ms = {kind.slo.ttft_ms}
tpot_ms = {kind.slo.tpot_ms}
attainment = {GOAL}
[search]
tp = [1]
requests = 150
seconds = 30
finalists = 1
"""


async def profile(args: argparse.Namespace, mixture: Mixture, out: Path) -> None:
    """One mixed worker under the workload. Raises ServerError."""
    async with AsyncExitStack() as stack:
        say("profiling a mixed worker")
        base = (*BASE_FLAGS, *shlex.split(args.serve_flags))
        server = await open_server(
            PROFILED, mixture, stack, base=base, folder=args.out.parent / f"{args.out.name}-logs"
        )
        answered = await warm_up(server, mixture, args.warm_up)
        await asyncio.sleep(1.5 * HEARTBEAT_SECONDS)  # the last steps are told of
        await write_profile(out, server.endpoint.target.url, "mixed-0", model_sizes())
        say(f"{answered:.2f} req/s in a closed loop of six")


async def plan(mixture: Mixture, profile_file: Path, out: Path) -> dict[str, Any]:
    """What `millrace plan` answers for two devices like the profiled worker's. Raises ServerError."""
    say("planning two devices")
    asked, told = out.with_name(f"{out.name}-question.toml"), out.with_name(f"{out.name}-plan.json")
    asked.write_text(question(mixture, profile_file))
    folder = out.with_name(f"{out.name}-plan")
    await command("plan", str(asked), "--no-report", "--output", str(folder), "--json", str(told))
    found: dict[str, Any] = orjson.loads(told.read_bytes())
    return found


def planned_goodput(ranked: Sequence[Mapping[str, Any]], workers: Mapping[str, int]) -> float | None:
    """Requests a second of the placement with these workers; None where the plan has none."""
    return next((float(each["goodput"]) for each in ranked if each["workers"] == workers), None)


def measured_goodput(told: Mapping[str, Any]) -> dict[str, tuple[float | None, bool]]:
    """By contender, from what bench.policies has written: the crossing of the goal where there is one, else the highest
    rate that attained; and whether a higher one is known that does not."""
    contenders = [one for case in told["cases"] for one in case["contenders"]]
    return {one["name"]: (one["crossing"] or one["goodput"], one["failing"] is not None) for one in contenders}


def report(planned: Mapping[str, Any], told: Mapping[str, Any], about: str) -> str:
    """Markdown: both figures of both fleets, and what the ratios say."""
    measured = measured_goodput(told)
    sides = {
        name: (planned_goodput(planned["ranked"], WORKERS[name]), *measured.get(fleet.name, (None, False)))
        for name, fleet in FLEETS.items()
    }
    rows = [
        [FLEETS[name].name, number(simulated), number(served) if bounded else f"≥ {number(served)}"]
        for name, (simulated, served, bounded) in sides.items()
    ]
    ratios = [_ratio(sides["split"][side], sides["aggregated"][side]) for side in (0, 1)]
    rows.append(["split ÷ aggregated", *("—" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    heads = ["two workers", "planned (simulated), requests/s", "measured, requests/s"]
    ended = all(bounded for *_, bounded in sides.values())
    answer = judgement(*ratios) if ended else "The time was up before a rate failed: the same command goes on."
    return "\n\n".join([about, table(heads, rows), f"The plan: {planned['verdict']}", answer]) + "\n"


def _ratio(split: float | None, mixed: float | None) -> float | None:
    return split / mixed if split is not None and mixed else None


def judgement(planned: float | None, measured: float | None) -> str:
    """Whether the plan's answer is what was measured."""
    if planned is None or measured is None:
        return "One side is missing: no rate attained there, or the time was up."
    words = [_word(ratio) for ratio in (planned, measured)]
    if words[0] == words[1]:
        return f"Both say that splitting {words[0]} here."
    return f"They differ: planned, splitting {words[0]}; measured, it {words[1]}."


def _word(ratio: float) -> str:
    if abs(ratio - 1) <= EVEN:
        return "makes no difference"
    return "does not pay" if ratio < 1 else "pays"


def comparison_options(args: argparse.Namespace, start: float | None, until: float) -> ComparisonOptions:
    """Of a search from the rate that is given, or else from `start`."""
    return ComparisonOptions(
        out=args.out,
        base=(*BASE_FLAGS, *shlex.split(args.serve_flags)),
        seconds=args.seconds,
        seeds=args.seeds,
        goal=GOAL,
        tolerance=TOLERANCE,
        warm_up=args.warm_up,
        start=args.rate or start,
        until=until,
        growth=GROWTH,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.do_not_disaggregate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=64, metavar="N", help="in the mean (64)")
    add("--output-tokens", type=int, default=128, metavar="N", help="in the mean (128)")
    add("--spread", type=float, default=0.3, metavar="X", help="of the logarithm of both (0.3)")
    add("--ttft-ms", type=float, default=2000.0, help="objective of every request (2000)")
    add("--tpot-ms", type=float, default=60.0, help="the same, of each token after the first (60)")
    add("--minutes", type=float, default=8.0, metavar="M", help="begin no run after that (8)")
    add("--seconds", type=float, default=20.0, metavar="S", help="of arrivals in a run (20)")
    add("--seeds", type=int, default=2, metavar="N", help="runs that a rate is judged by (2)")
    add("--rate", type=float, metavar="R", help="the first rate (what is planned of split workers)")
    add("--warm-up", type=float, default=12.0, metavar="S", help="of each server (12)")
    flags = "--quantization int8 --num-speculative-tokens 0"
    add("--serve-flags", default=flags, metavar="FLAGS", help=f"of every server ({flags})")
    name = "bench-do-not-disaggregate"
    add("--out", type=Path, default=Path(name), metavar="PATH", help=f"beginning of files ({name})")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ValueError that names the flag."""
    for name in ("prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms", "minutes", "seconds", "seeds", "warm_up"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g}: give a number above 0")
    if not 0 <= args.spread <= 1:
        raise ValueError(f"--spread {args.spread:g}: give 0 to 1")


async def sit(args: argparse.Namespace) -> int:
    """Profile, plan, measure, and write; the exit status of the measurement."""
    until, mixture, out = time.monotonic() + 60 * args.minutes, mixture_of(args), args.out
    kept = out.with_name(f"{out.name}-profile.json")
    if not kept.exists():
        await profile(args, mixture, kept)
    planned = await plan(mixture, kept, out)
    say(planned["verdict"])
    case = f"do not disaggregate, {mixture.describe()}, {args.seconds:g} s, {args.serve_flags}"
    comparison = Comparison(name="do not disaggregate", case=case, mixture=mixture, contenders=tuple(FLEETS.values()))
    start = planned_goodput(planned["ranked"], WORKERS["split"])
    status = await compare(comparison_options(args, start, until), [comparison])
    about = f"{datetime.now(UTC).isoformat(timespec='seconds')}, commit {commit() or 'unknown'}. {mixture.describe()}."
    text = report(planned, json.loads(out.with_suffix(".json").read_text()), about)
    out.with_name(f"{out.name}-answer.md").write_text(text)
    print(text)
    return status


def main() -> int:
    """Run the command; the process's exit status."""
    try:
        args = make_parser().parse_args()
        check(args)
        args.out = args.out.absolute()  # commands run in the checkout
        return asyncio.run(sit(args))
    except (ValueError, OSError, ServerError) as error:
        say(f"bench.do_not_disaggregate: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
