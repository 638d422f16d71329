"""Goodput of routing policies, fleets and settings of this checkout, and of peers, on real processes.

    python -m bench.policies                                      the four policies on two mixed workers
    python -m bench.policies --preset modes,chunks,ablation --budget-minutes 120
    python -m bench.policies --contender 'ours=--mixed 2 --routing-policy goodput' --url vllm=http://127.0.0.1:8811

All servers of a comparison are up together and take turns: each run is one rate and one seed on one of them, arrivals
are Poisson and the same for all, stretched to the rate. Every run is kept at once, so that the same command goes on
where an earlier one was ended. It starts servers and sends to them; what their runs amount to is bench.race's matter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.contenders import (
    PRESETS,
    Contender,
    of_policies,
    parse_contender,
    parse_fleet,
    parse_peer,
)
from bench.endpoint import ServerError
from bench.goodput import SearchLimits
from bench.ledger import Ledger, Trial, TrialKey
from bench.mixture import MIXTURES, Mixture, mixture_of
from bench.own_server import commit
from bench.race import Race, attainment
from bench.report import number
from bench.sitting import BASE_FLAGS, OpenServer, measure, open_server, warm_up
from bench.standings import CaseResult, as_json, markdown

DONE, WITH_ERRORS, UNUSABLE, INTERRUPTED = 0, 1, 2, 130  # exit statuses


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Contenders over one workload; `case` is what its runs are kept under, in full."""

    name: str
    case: str
    mixture: Mixture
    contenders: tuple[Contender, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonOptions:
    """How comparisons are made. `until` is when no further run begins, in seconds of time.monotonic()."""

    out: Path
    base: tuple[str, ...]  # flags of every server of ours
    seconds: float
    seeds: int
    goal: float
    tolerance: float
    warm_up: float
    start: float | None
    until: float
    first_share: float = 0.7  # of what a closed loop gave, where no first rate is given
    growth: float = 1.3  # between rates until the goodput is bracketed


class Referee:
    """Makes comparisons one after the other, and writes the ledger, tables and JSON of all beside each other."""

    def __init__(self, options: ComparisonOptions):
        self.options = options
        self.ledger = Ledger(options.out.with_suffix(".jsonl"))
        self.results: list[CaseResult] = []
        self.interrupted = asyncio.Event()
        self.failed = False
        self._commit = commit()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")

    async def run(self, comparisons: Sequence[Comparison]) -> None:
        """Each has an equal share of the time that is left when it begins; one whose servers fail ends early."""
        for number_, comparison in enumerate(comparisons):
            now = time.monotonic()
            until = now + (self.options.until - now) / (len(comparisons) - number_)
            try:
                await self._compare(comparison, until)
            except ServerError as error:
                self.failed = True
                say(f"bench.policies: {comparison.name}, {comparison.mixture.name} is left as it is: {error}")
            finally:
                self._write()
            if self.interrupted.is_set():
                return

    async def _compare(self, comparison: Comparison, until: float) -> None:
        say(f"── {comparison.name}, {comparison.mixture.name}: {comparison.mixture.describe()}")
        start = self._start_of(comparison)
        async with AsyncExitStack() as stack:
            servers: dict[str, OpenServer] = {}
            if start is None or any(self._next_unmeasured(race) for race in self._races(comparison, start)):
                servers, warmed = await self._open(comparison, stack)
                start = start if start is not None else self._note_start(comparison, warmed)
            races = self._races(comparison, start or 1.0)
            for race in races:
                self._next_unmeasured(race)
            self.results.append(self._result(comparison, races))
            while not self.interrupted.is_set() and time.monotonic() < until:
                if not await self._round(comparison, races, servers, until):
                    break
                self.results[-1] = self._result(comparison, races)
            self.results[-1] = self._result(comparison, races)
        print(markdown(self.results[-1:], started_at=self._started_at, commit=self._commit), flush=True)

    async def _round(
        self, comparison: Comparison, races: Sequence[Race], servers: dict[str, OpenServer], until: float
    ) -> bool:
        """One run of each contender that wants one; False when none does."""
        wanted = False
        for race in races:
            key = self._next_unmeasured(race)
            if key is None:
                continue
            wanted = True
            if self.interrupted.is_set() or time.monotonic() >= until:
                return True
            trial = await measure(
                servers[race.contender.name],
                comparison.mixture,
                key,
                seconds=self.options.seconds,
                allowance=race.allowance,
                interrupted=self.interrupted,
                commit=self._commit,
            )
            if trial is None:
                return True
            self.ledger.add(trial)
            race.record(trial)
            say(self._line(race, trial, until))
        return wanted

    def _line(self, race: Race, trial: Trial, until: float) -> str:
        share = f"{attainment([trial]):6.1%}" + (" and given up" if trial.stopped else "")
        share += "".join(f", {count} {kind}" for kind, count in trial.errors.items())
        found = race.standing()
        between = f"goodput {number(found.rate)} to {number(found.failing)}"
        left = max(0.0, until - time.monotonic()) / 60
        end = "found" if found.finished else f"{left:.0f} min left" if math.isfinite(left) else ""
        place = f"{race.contender.name:<22} {trial.key.rate:7.3g} req/s, seed {trial.key.seed}"
        return f"{datetime.now(UTC):%H:%M:%S}  {place}: {share}  ({between}) {end}"

    def _next_unmeasured(self, race: Race) -> TrialKey | None:
        """What the race wants next, once all that is kept from before has been recorded."""
        while (key := race.next()) is not None and key in self.ledger.trials:
            race.record(self.ledger.trials[key])
        return key

    def _races(self, comparison: Comparison, start: float) -> list[Race]:
        options = self.options
        limits = SearchLimits(
            start=start, attainment=options.goal, tolerance=options.tolerance, growth=options.growth, lowest=0.05
        )
        seeds = range(options.seeds)
        return [Race(comparison.case, contender, limits, seeds) for contender in comparison.contenders]

    def _start_of(self, comparison: Comparison) -> float | None:
        """The first rate, as given or as an earlier life of the comparison has found it."""
        if self.options.start is not None:
            return self.options.start
        kept = self.ledger.notes.get(f"start of {comparison.case}")
        return float(kept) if kept is not None else None

    def _note_start(self, comparison: Comparison, answered: Sequence[float]) -> float:
        start = float(f"{self.options.first_share * statistics.median(answered):.2g}")
        self.ledger.note(f"start of {comparison.case}", start)
        return start

    async def _open(self, comparison: Comparison, stack: AsyncExitStack) -> tuple[dict[str, OpenServer], list[float]]:
        """All servers, each warmed up, and how many requests a second it then answered."""
        servers: dict[str, OpenServer] = {}
        answered = []
        folder = self.options.out.parent / f"{self.options.out.name}-logs"
        for contender in comparison.contenders:
            server = await open_server(contender, comparison.mixture, stack, base=self.options.base, folder=folder)
            answered.append(await warm_up(server, comparison.mixture, self.options.warm_up))
            say(f"{contender.name:<22} is warm: {answered[-1]:.2f} req/s in a closed loop of six")
            servers[contender.name] = server
        return servers, answered

    def _result(self, comparison: Comparison, races: Sequence[Race]) -> CaseResult:
        return CaseResult(
            name=comparison.name,
            mixture=comparison.mixture,
            standings=[race.standing() for race in races],
            goal=self.options.goal,
            seeds=self.options.seeds,
            seconds=self.options.seconds,
        )

    def _write(self) -> None:
        told = {"started_at": self._started_at, "commit": self._commit}
        out = self.options.out
        out.with_suffix(".md").write_text(markdown(self.results, **told))
        out.with_suffix(".json").write_text(json.dumps(as_json(self.results, **told), indent=1))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who is compared").add_argument
    add("--preset", default="", metavar="LIST", help=f"comparisons, of {', '.join(PRESETS)} (policies)")
    add("--policies", default="", metavar="LIST", help="or these routing policies")
    add("--fleet", action="append", default=[], metavar="[NAME:]mixed=2", help="on these workers; may be repeated")
    add("--contender", action="append", default=[], metavar="NAME=FLAGS", help="or a server of ours with these flags")
    add("--url", action="append", default=[], metavar="NAME=URL", help="beside them a server that runs already")
    add("--only", default="", metavar="LIST", help="contenders by name; the others are left out")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of every server of ours")
    add = parser.add_argument_group("what is asked of them").add_argument
    add("--workloads", default=",".join(MIXTURES), metavar="LIST", help="(all)")
    add("--slo-scale", type=float, default=1.0, metavar="X", help="multiplies every objective (1)")
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
        mixture = mixture_of(workload).scaled(args.slo_scale)
        for name, members in groups.items():
            chosen = tuple(one for one in (*members, *peers) if not only or one.name in only)
            if len({one.name for one in chosen}) < len(chosen) or not chosen:
                raise ValueError("contenders need names of their own, and there must be some")
            settings = f"{args.seconds:g} s {args.serve_flags} x{args.slo_scale:g} {mixture.describe()}"
            groups_of = in_groups(chosen, args.at_once)
            for number_, group in enumerate(groups_of, 1):
                title = f"{name} {number_}" if len(groups_of) > 1 else name
                case = f"{title}, {workload}, {settings}"
                found.append(Comparison(name=title, case=case, mixture=mixture, contenders=group))
    return found


def in_groups(contenders: tuple[Contender, ...], at_once: int) -> list[tuple[Contender, ...]]:
    """At most `at_once` in each, the first in all. Raises ValueError."""
    if at_once < 2:
        raise ValueError("--at-once must be at least 2")
    first, rest = contenders[:1], contenders[1:]
    starts = range(0, max(1, len(rest)), at_once - 1)
    return [(*first, *rest[start : start + at_once - 1]) for start in starts]


def options_of(args: argparse.Namespace) -> ComparisonOptions:
    """Raises ValueError."""
    for name in ("seconds", "warm_up", "budget_minutes", "slo_scale", "seeds", "first_share"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g}: must be positive")
    return ComparisonOptions(
        out=args.out,
        base=(*BASE_FLAGS, *shlex.split(args.serve_flags)),
        seconds=args.seconds,
        seeds=args.seeds,
        goal=args.attainment,
        tolerance=args.rate_tolerance,
        warm_up=args.warm_up,
        start=args.rate,
        until=time.monotonic() + 60 * args.budget_minutes,
        first_share=args.first_share,
        growth=args.growth,
    )


async def compare(options: ComparisonOptions, comparisons: Sequence[Comparison]) -> int:
    referee = Referee(options)
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
        return asyncio.run(compare(options_of(args), comparisons_of(args)))
    except (ValueError, OSError) as error:
        say(f"bench.policies: {error}")
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
