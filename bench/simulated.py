"""Runs on real servers beside the same runs simulated: attainment, TTFT and TPOT, of each deployment and workload.

    python -m bench.simulated                                    about twelve minutes, on a quiet machine
    python -m bench.simulated --paced                            as long; other work on the machine hardly matters
    python -m bench.simulated --deployments split --workloads chat --seconds 20 --shares 0.2 --out /tmp/try
    python -m bench.simulated --again                            simulate anew what was measured

A server of this checkout answers closed loops of each workload, from which its workers learn their steps and which give
its capacity; single requests give what the API and the end of a handoff take. With that, and nothing fitted to a
workload, `millrace simulate` repeats each run: the same arrivals, lengths, shared texts and objectives, by what the
workers had learned at the time of the run. Every run is kept at once, so that the same command goes on where an earlier
one was ended.

With --paced a step computes a small model and then sleeps until it has lasted as long as a step cost says. All else is
real. So the machine's own speed, which may change within minutes, has no part in how far both sides are apart; it says
nothing of how well real steps are predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.agreement import Agreement, ServedFigures, agreement_table, simulated_figures, summary_line
from bench.around_steps import beside_steps
from bench.contenders import Contender
from bench.deployments import (
    DEPLOYMENTS,
    ServedRun,
    ServedWorkers,
    cases_of,
    mean_profile,
    pace_line,
    slower,
    told_cost,
    told_of,
)
from bench.endpoint import ServerError
from bench.ledger import Ledger
from bench.mixture import MIXTURES
from bench.own_server import commit
from bench.own_simulator import model_sizes, simulate, simulator_flags, worker_flags
from bench.premises import STEADY, Premises, premises
from bench.progress import say
from bench.served_runs import SHORT, USUAL, ServedDeployment
from bench.sitting import BASE_FLAGS, open_server, warm_up
from bench.step_traces import cut_steps, logs_of, steps_of, trace_flags, traced_steps
from serving.step_cost import StepCost

DONE, UNUSABLE, INTERRUPTED = 0, 2, 130  # exit statuses
SEEDS = 3  # simulations of a run: its steps vary
SERVER = MIXTURES["shared-prefix"]  # its KV blocks are those of every server here
REAL_FLAGS = "--quantization int8 --num-speculative-tokens 0"
REAL_SCALE, PACED_SCALE = 2.0, 3.0  # of objectives: a step of six sequences is to be well within the tightest TPOT
PACED_FLAGS = "--kernels torch --dtype float32 --num-speculative-tokens 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedOptions:
    """`until` is when no further run begins, in seconds of time.monotonic()."""

    out: Path
    base: tuple[str, ...]
    slo_scale: float
    cases: tuple[ServedRun, ...]
    seconds: float
    warm_up: float
    seed: int
    until: float
    again: bool = False
    paced: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """What runs of one file have in common."""
        told = {"flags": list(self.base), "seconds": self.seconds, "seed": self.seed, "slo_scale": self.slo_scale}
        return {**told, "paced": self.paced}


class MeasuredTwice:
    """Measures, learns and simulates; keeps everything in the ledger, and writes tables of what there is."""

    def __init__(self, options: SimulatedOptions, on: Premises):
        self.options = options
        self.on = on
        self.ledger = Ledger(options.out.with_suffix(".jsonl"))
        self.interrupted = asyncio.Event()
        self._sizes = model_sizes(on.model)
        self._commit = commit()
        kept = self.ledger.notes.setdefault("settings", options.settings)
        if kept != options.settings:
            raise ValueError(f"{self.ledger.path} is of other settings ({kept}): give another --out")
        self.ledger.note("settings", options.settings)

    async def run(self) -> None:
        """Measure what is left to measure, then simulate all of it. Raises ServerError."""
        todo = [case for case in self.options.cases if case.key not in self._runs]
        try:
            if todo and not self._over:
                await self._measure_all(todo)
            for deployment in {case.deployment.name: case.deployment for case in self.options.cases}.values():
                await self._learn_around(deployment)  # no server is up: all of its steps are in its trace
            for case in self.options.cases:
                if self.options.again or f"simulated {case.key}" not in self.ledger.notes:
                    await self._simulate(case)
        finally:
            self.write()

    @property
    def _runs(self) -> dict[str, Any]:
        """What was measured, by the run's key."""
        return {name.removeprefix("run "): kept for name, kept in self.ledger.notes.items() if name.startswith("run ")}

    async def _measure_all(self, todo: Sequence[ServedRun]) -> None:
        """All servers are up at once, and take turns; paced ones do not take each other's cores, and run beside it."""
        deployments = {case.deployment.name: case.deployment for case in todo}
        async with AsyncExitStack() as stack:
            served = {name: await self._open(one, stack) for name, one in deployments.items()}
            lanes = [[name] for name in served] if self.options.paced else [list(served)]
            await asyncio.gather(*(self._lane([served[name] for name in lane], todo) for lane in lanes))
        for case in todo:
            if case.key in self._runs:
                cut_steps(logs_of(self.options.out), case.deployment, case.key, *self._runs[case.key]["span"])

    async def _lane(self, servers: Sequence[ServedDeployment], todo: Sequence[ServedRun]) -> None:
        """One run at a time, on these servers."""
        by_name = {one.deployment.name: one for one in servers}
        for one in servers:
            if not self._over:
                await self._learn(one)
        for case in todo:
            if case.deployment.name in by_name and not self._over:
                await self._measure(by_name[case.deployment.name], case)

    async def _open(self, deployment: ServedWorkers, stack: AsyncExitStack) -> ServedDeployment:
        folder = logs_of(self.options.out)
        flags = (*deployment.flags(folder, self.on.model), *trace_flags(folder, deployment))
        contender = Contender(name=deployment.name, flags=flags)
        folder.mkdir(parents=True, exist_ok=True)
        if not deployment.embedded:
            (folder / f"{deployment.name}.toml").write_text(deployment.placement)
        say(f"starting a server: {deployment.name}")
        module, base = self.on.module, self.options.base
        server = await open_server(contender, SERVER, stack, base=base, folder=folder, module=module)
        return ServedDeployment(server=server, deployment=deployment, sizes=self._sizes, interrupted=self.interrupted)

    @property
    def _over(self) -> bool:
        return self.interrupted.is_set() or time.monotonic() >= self.options.until

    def _learned(self, deployment: ServedWorkers) -> Mapping[str, Any] | None:
        """What was learned of it, once that is all."""
        found: Mapping[str, Any] | None = self.ledger.notes.get(f"learned {deployment.name}")
        return found if found is not None and "front_ms" in found else None

    async def _learn(self, one: ServedDeployment) -> None:
        """Capacity by workload, the workers' profiles, and single requests (`_learn_around`).

        Where an earlier run of the command has learned that, the workers alone learn again.
        """
        deployment, seed = one.deployment, self.options.seed
        if self._learned(deployment) is not None:
            await warm_up(one.server, MIXTURES["chat"], self.options.warm_up)
            return
        capacity: dict[str, float] = {}
        short: list[dict[str, Any]] = []
        usual: list[dict[str, Any]] = []
        found = []
        for name in MIXTURES:
            capacity[name] = await warm_up(one.server, MIXTURES[name], self.options.warm_up)
            say(f"{deployment.name}, {name}: {capacity[name]:.2f} req/s in a closed loop of six")
            found.append(await one.latest())
            short = short or await one.lone(SHORT, seed)
            if not deployment.embedded:
                usual = usual or await one.lone(USUAL, seed)
        profiles = {role: mean_profile([each[role] for each in found]) for role in deployment.roles}
        learned = {"capacity": capacity, "profiles": profiles, "short": short, "usual": usual}
        self.ledger.note(f"learned {deployment.name}", learned)

    async def _learn_around(self, deployment: ServedWorkers) -> None:
        """What its single requests took beside their steps: a slow step is not the front's doing."""
        learned: Mapping[str, Any] | None = self.ledger.notes.get(f"learned {deployment.name}")
        if learned is None or "front_ms" in learned:
            return
        found: dict[str, Any] = {**learned, "front_ms": 0.0, "commit_ms": 0.0}
        found["front_ms"] = await self._beside(found["short"], "ttft", deployment, found)
        if found["usual"]:
            found["commit_ms"] = await self._beside(found["usual"], "tpot", deployment, found)
        self.ledger.note(f"learned {deployment.name}", found)
        say(f"{deployment.name}: {told_of(found)}")

    async def _beside(
        self, lone: Sequence[Mapping[str, Any]], latency: str, deployment: ServedWorkers, learned: Mapping[str, Any]
    ) -> float:
        """Milliseconds that single requests take beyond what is simulated of them, in the median, their steps aside."""
        flags = worker_flags(deployment, learned["profiles"], learned, self.options.out)
        alone = simulated_figures(await simulate(lone, [*flags, "--noise", "0"])).latencies[f"{latency}_p50"] or 0.0
        costs = {role: StepCost(**profile["cost"]) for role, profile in learned["profiles"].items()}
        workers = traced_steps(logs_of(self.options.out), deployment, costs)
        found, traced = beside_steps(lone, latency, workers, alone)
        if not traced:
            say(f"{deployment.name}: no step of single requests is in the trace, so slow ones count as around them")
        return found

    async def _measure(self, one: ServedDeployment, case: ServedRun) -> None:
        """One run, at its share of what the machine's present speed allows; kept unless it was interrupted."""
        learned = self.ledger.notes[f"learned {case.deployment.name}"]
        capacity = learned["capacity"][case.mixture.name]
        rate = case.share * capacity / slower(await one.latest(), learned["profiles"])
        say(f"{case.key}: {rate:.2f} requests a second")
        kept = await one.measure(case, rate, self.options.seconds, self.options.seed + case.round)
        if kept is not None:
            self.ledger.note(f"run {case.key}", {**kept, "commit": self._commit})

    async def _simulate(self, case: ServedRun) -> None:
        """The run as it was measured, by what its workers had learned meanwhile."""
        kept, learned = self._runs.get(case.key), self._learned(case.deployment)
        if kept is None or learned is None:
            return
        steps = steps_of(logs_of(self.options.out), case.deployment, case.key)
        flags = simulator_flags(case.deployment, learned, kept["profiles"], self.options.out, steps)
        found = await simulate(kept["rows"], [*flags, "--seeds", str(SEEDS)])
        self.ledger.note(f"simulated {case.key}", found)
        say(agreement_table(self.agreements([case])))

    def agreements(self, cases: Sequence[ServedRun]) -> list[Agreement]:
        """Of everything that has been measured and simulated, rounds together, in the order of the cases."""
        pairs: dict[str, list[tuple[ServedFigures, ServedFigures]]] = {}
        rates: dict[str, list[float]] = {}
        for case in cases:
            kept, simulated = self._runs.get(case.key), self.ledger.notes.get(f"simulated {case.key}")
            if kept is not None and simulated is not None:
                both = ServedFigures(**kept["measured"]), simulated_figures(simulated)
                pairs.setdefault(case.case, []).append(both)
                rates.setdefault(case.case, []).append(kept["rate"])
        first = {case.case: case for case in reversed(cases)}
        return [
            Agreement(
                case=name,
                deployment=first[name].deployment.name,
                workload=first[name].mixture.name,
                share=first[name].share,
                rate=statistics.mean(rates[name]),
                pairs=found,
            )
            for name, found in pairs.items()
        ]

    def write(self) -> None:
        """The table and JSON of what there is."""
        found, out = self.agreements(self.options.cases), self.options.out
        names = sorted({case.deployment.name for case in self.options.cases})
        learned = {name: dict(kept) for name in names if (kept := self._learned(DEPLOYMENTS[name])) is not None}
        lines = [self._about(), *(f"{name}: {told_of(kept)}" for name, kept in learned.items())]
        for name, kept in learned.items():
            paces = [
                slower(run["profiles"], kept["profiles"]) for key, run in self._runs.items() if key.startswith(name)
            ]
            lines += [pace_line(name, paces)] if paces else []
        if found:
            lines += [agreement_table(found), summary_line(found)]
        out.with_suffix(".md").write_text("\n\n".join(lines) + "\n")
        told = [{**asdict(each), "too_far": each.too_far} for each in found]
        for kept in learned.values():
            for name in ("short", "usual"):
                kept.pop(name, None)  # they are in the ledger
        text = json.dumps({"about": self._about(), "learned": learned, "cases": told}, indent=1)
        out.with_suffix(".json").write_text(text)

    def _about(self) -> str:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        loads = [kept["load"] for kept in self._runs.values()]
        pace = f", {told_cost('paced', asdict(self.on.pace))}" if self.on.pace is not None else ""
        return (
            f"{started}, commit {self._commit or 'unknown'}, {shlex.join(self.options.base)}{pace}; runs of"
            f" {self.options.seconds:g} s, objectives × {self.options.slo_scale:g}, load {min(loads, default=0):.1f} to"
            f" {max(loads, default=0):.1f}. Measured → simulated."
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--paced", action="store_true", help="steps last as a step cost says, on any machine; all else is real")
    add("--deployments", default=",".join(DEPLOYMENTS), metavar="LIST", help="(embedded,split)")
    add("--workloads", default=",".join(MIXTURES), metavar="LIST", help="(chat,long-mixed,shared-prefix)")
    add("--shares", default="0.6", metavar="X,…", help="of what a closed loop of six gave, a run each (0.6)")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each, whose medians count (3)")
    add("--seconds", type=float, default=15.0, metavar="S", help="of arrivals in a run (15)")
    add("--slo-scale", type=float, metavar="X", help="multiplies every objective: cores differ (2; paced: 3)")
    add("--warm-up", type=float, default=8.0, metavar="S", help="of each workload, to learn from (8)")
    add("--minutes", type=float, default=9.5, metavar="M", help="begin no run after that (9.5)")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and lengths (0)")
    add("--serve-flags", metavar="FLAGS", help=f"of every server ({REAL_FLAGS}; paced: {PACED_FLAGS})")
    add("--again", action="store_true", help="simulate anew what was measured before")
    add(
        "--out", type=Path, default=Path("bench-simulated"), metavar="PATH", help="beginning of files (bench-simulated)"
    )
    return parser


def options_of(args: argparse.Namespace) -> SimulatedOptions:
    """Raises ValueError that names the flag."""
    for name in ("seconds", "warm_up", "minutes", "slo_scale", "rounds"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g}: give a number above 0")
    return SimulatedOptions(
        out=args.out,
        base=(*BASE_FLAGS[2:], *shlex.split(args.serve_flags)),  # threads are each deployment's own
        slo_scale=args.slo_scale,
        cases=tuple(cases_of(args)),
        seconds=args.seconds,
        warm_up=args.warm_up,
        seed=args.seed,
        until=time.monotonic() + 60 * args.minutes,
        again=args.again,
        paced=args.paced,
    )


async def measure(options: SimulatedOptions, on: Premises) -> int:
    """Measure and simulate; the process's exit status. Raises ServerError, ValueError, OSError."""
    twice = MeasuredTwice(options, on)
    gc.freeze()  # what is loaded by now: no collection looks at it while tokens come
    with contextlib.suppress(NotImplementedError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, twice.interrupted.set)
    running, ending = asyncio.create_task(twice.run()), asyncio.create_task(twice.interrupted.wait())
    await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, ending):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    print(options.out.with_suffix(".md").read_text())
    say(f"wrote {options.out}.md, .json and .jsonl")
    return INTERRUPTED if twice.interrupted.is_set() else DONE


def asked(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what depends on --paced where it was not given."""
    args = make_parser().parse_args(arguments)
    if args.slo_scale is None:
        args.slo_scale = PACED_SCALE if args.paced else REAL_SCALE
    if args.serve_flags is None:
        args.serve_flags = PACED_FLAGS if args.paced else REAL_FLAGS
    return args


def main() -> int:
    """Run the command; the process's exit status."""
    try:
        options = options_of(asked())
        with premises(STEADY if options.paced else None) as on:
            return asyncio.run(measure(options, on))
    except (ValueError, OSError, ServerError) as error:
        say(f"bench.simulated: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
