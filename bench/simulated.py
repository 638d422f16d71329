"""Runs on real servers beside the same runs simulated: attainment, TTFT and TPOT, of each deployment and workload.

    python -m bench.simulated                                    about eleven minutes, on a quiet machine
    python -m bench.simulated --deployments split --workloads chat --seconds 20 --shares 0.2 --out /tmp/try
    python -m bench.simulated --again                            simulate anew what was measured

A server of this checkout answers closed loops of each workload, from which its workers learn their steps and which give
its capacity; single requests give what the API and the end of a handoff take. With that, and nothing fitted to a
workload, `millrace simulate` repeats each run: the same arrivals, lengths, shared texts and objectives. Every run is
kept at once, so that the same command goes on where an earlier one was ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.agreement import Agreement, ServedFigures, agreement_table, measured_figures, simulated_figures, summary_line
from bench.contenders import Contender
from bench.deployments import (
    DEPLOYMENTS,
    ServedRun,
    ServedWorkers,
    cases_of,
    mean_profile,
    noise_of,
    pace,
    prelude,
    row_of,
    salted,
    told_of,
)
from bench.endpoint import ServerError
from bench.ledger import Ledger
from bench.load import Pace, Watch, run_load
from bench.mixture import MIXTURES, Mixture, RequestKind
from bench.own_server import commit
from bench.own_simulator import model_sizes, simulate, write_profile
from bench.sitting import BASE_FLAGS, OpenServer, open_server, settle, warm_up

DONE, UNUSABLE, INTERRUPTED = 0, 2, 130  # exit statuses
HEARTBEAT_SECONDS = 1.0  # of `millrace serve`
SEEDS = 3  # simulations of a run: its steps vary
SERVER = MIXTURES["shared-prefix"]  # its KV blocks are those of every server here
# Single requests of two tokens. A short prompt's TTFT tells what is around its steps, a usual one's second token how
# long the end of a handoff takes.
SHORT, USUAL = (
    Mixture(name="lone", kinds=(RequestKind(name="lone", prompt_tokens=tokens, output_tokens=2),))
    for tokens in (32, 256)
)
LONE_REQUESTS = 12
LONE_PAUSE = 0.1  # seconds between them


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
    after: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """What runs of one file have in common."""
        return {"flags": list(self.base), "seconds": self.seconds, "seed": self.seed, "slo_scale": self.slo_scale}


class MeasuredTwice:
    """Measures, learns and simulates; keeps everything in the ledger, and writes tables of what there is."""

    def __init__(self, options: SimulatedOptions):
        self.options = options
        self.ledger = Ledger(options.out.with_suffix(".jsonl"))
        self.interrupted = asyncio.Event()
        self._sizes = model_sizes()
        self._commit = commit()
        kept = self.ledger.notes.setdefault("settings", options.settings)
        if kept != options.settings:
            raise ValueError(f"{self.ledger.path} is of other settings ({kept}): give another --out")
        self.ledger.note("settings", options.settings)

    async def run(self) -> None:
        """Raises ServerError."""
        for deployment in dict.fromkeys(case.deployment.name for case in self.options.cases):
            cases = [case for case in self.options.cases if case.deployment.name == deployment]
            try:
                await self._measure_all(cases[0].deployment, [one for one in cases if one.key not in self._runs])
                if self.options.again:
                    for case in cases:
                        await self._simulate(case)
            finally:
                self.write()

    @property
    def _runs(self) -> dict[str, Any]:
        """The last of each case, by its key."""
        return {name.removeprefix("run "): kept for name, kept in self.ledger.notes.items() if name.startswith("run ")}

    async def _measure_all(self, deployment: ServedWorkers, cases: Sequence[ServedRun]) -> None:
        if not cases or self._over:
            return
        async with AsyncExitStack() as stack:
            folder = self.options.out.absolute().with_name(f"{self.options.out.name}-logs")
            contender = Contender(name=deployment.name, flags=deployment.flags(folder))
            if not deployment.embedded:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{deployment.name}.toml").write_text(deployment.placement)
            say(f"starting a server: {deployment.name}, threads {dict(deployment.threads)}")
            server = await open_server(contender, SERVER, stack, base=self.options.base, folder=folder)
            if self._learned(deployment) is None:
                await self._learn(server, deployment)
            else:
                await warm_up(server, MIXTURES["chat"], self.options.warm_up / 2)
            for case in cases:
                if self._over:
                    return
                await self._measure(server, case)
                if case.key in self._runs:
                    await self._simulate(case)
                    say(agreement_table([one for one in self.agreements() if one.case == case.key]))
            self.ledger.note(f"after {deployment.name}", await self._profiles(server, deployment))

    @property
    def _over(self) -> bool:
        return self.interrupted.is_set() or time.monotonic() >= self.options.until

    def _learned(self, deployment: ServedWorkers) -> Mapping[str, Any] | None:
        """With `after`, the profiles are those of the end, where there are some."""
        found: Mapping[str, Any] | None = self.ledger.notes.get(f"learned {deployment.name}")
        after = self.ledger.notes.get(f"after {deployment.name}")
        return found if not self.options.after or found is None or after is None else {**found, "profiles": after}

    async def _learn(self, server: OpenServer, deployment: ServedWorkers) -> None:
        """Capacity by workload, the workers' profiles, and what single requests take beside their steps."""
        capacity: dict[str, float] = {}
        short: list[dict[str, Any]] = []
        usual: list[dict[str, Any]] = []
        found = []
        for name in MIXTURES:
            capacity[name] = await warm_up(server, MIXTURES[name], self.options.warm_up)
            say(f"{deployment.name}, {name}: {capacity[name]:.2f} req/s in a closed loop of six")
            found.append(await self._profiles(server, deployment))
            short = short or await self._lone(server, SHORT)
            if not deployment.embedded:
                usual = usual or await self._lone(server, USUAL)
        profiles = {role: mean_profile([each[role] for each in found]) for role in deployment.roles}
        learned: dict[str, Any] = {"capacity": capacity, "profiles": profiles, "front_ms": 0.0, "commit_ms": 0.0}
        learned["front_ms"] = await self._beside(short, "ttft", deployment, learned)
        if usual:
            learned["commit_ms"] = await self._beside(usual, "tpot", deployment, learned)
        self.ledger.note(f"learned {deployment.name}", learned)
        say(f"{deployment.name}: {told_of(learned)}")

    async def _profiles(self, server: OpenServer, deployment: ServedWorkers) -> dict[str, dict[str, Any]]:
        """What each worker has learned by now."""
        await asyncio.sleep(1.5 * HEARTBEAT_SECONDS)  # the last steps are told of
        url = server.endpoint.target.url
        return {
            role: dict(await write_profile(self._profile(deployment, role), url, f"{role}-0", self._sizes))
            for role in deployment.roles
        }

    async def _beside(
        self, lone: Sequence[Mapping[str, Any]], latency: str, deployment: ServedWorkers, learned: Mapping[str, Any]
    ) -> float:
        """Milliseconds that single requests take beyond what is simulated of them, in the median."""
        alone = simulated_figures(await simulate(lone, [*self._flags(deployment, learned), "--noise", "0"]))
        measured: float = statistics.median(row[f"{latency}_ms"] for row in lone)
        return max(0.0, measured - (alone.latencies[f"{latency}_p50"] or 0.0))

    async def _lone(self, server: OpenServer, mixture: Mixture) -> list[dict[str, Any]]:
        """One request after the other, on an idle server, as rows of a trace ten seconds apart."""
        timed = mixture.timed(1.0, LONE_REQUESTS, seed=self.options.seed, fresh=(time.time_ns(),))
        rows = []
        for number, (prepared, asked) in enumerate(zip(server.prepare(timed), timed, strict=True)):
            run = await run_load(server.endpoint, [prepared], Pace(concurrency=1), Watch(interrupted=self.interrupted))
            rows.append(row_of(replace(asked, at=10.0 * number), run.outcomes[0]))
            await asyncio.sleep(LONE_PAUSE)
        if any(row["tpot_ms"] is None for row in rows):
            raise ServerError("single requests were not answered: see the server's log")
        return rows

    async def _measure(self, server: OpenServer, case: ServedRun) -> None:
        """One run; kept unless it was interrupted."""
        learned, options = self._learned(case.deployment), self.options
        assert learned is not None
        rate = case.share * learned["capacity"][case.mixture.name]
        timed = salted(case.mixture.timed(rate, case.mixture.count(rate, options.seconds), seed=options.seed), case.key)
        before, prepared, load = prelude(timed), server.prepare(timed), os.getloadavg()[0]
        say(f"{case.key}: {len(timed)} requests at {rate:.2f} a second, load {load:.1f}")
        watch, arrivals = Watch(interrupted=self.interrupted), tuple(one.at for one in timed)
        first = await run_load(server.endpoint, server.prepare(before), Pace(concurrency=1), watch)
        gc.collect()
        run = await run_load(server.endpoint, prepared, Pace(arrivals=arrivals), watch)
        if first.stopped or run.stopped:
            return
        await settle(server)
        rows = [row_of(one, outcome, counted=False) for one, outcome in zip(before, first.outcomes, strict=True)]
        rows += [row_of(one, outcome) for one, outcome in zip(timed, run.outcomes, strict=True)]
        figures = asdict(measured_figures(run.outcomes, case.mixture.met))
        kept = {
            "rate": rate,
            "load": load,
            "measured": figures,
            "rows": rows,
            "at": time.time(),
            "commit": self._commit,
        }
        self.ledger.note(f"run {case.key}", kept)

    async def _simulate(self, case: ServedRun) -> None:
        kept, learned = self._runs.get(case.key), self._learned(case.deployment)
        if kept is None or learned is None:
            return
        flags = [*self._flags(case.deployment, learned), "--role-noise", noise_of(learned), "--seeds", str(SEEDS)]
        self.ledger.note(f"simulated {case.key}", await simulate(kept["rows"], flags))

    def _profile(self, deployment: ServedWorkers, role: str) -> Path:
        return self.options.out.absolute().with_name(f"{self.options.out.name}-{deployment.name}-{role}.json")

    def _flags(self, deployment: ServedWorkers, learned: Mapping[str, Any]) -> list[str]:
        """Of `millrace simulate`: the workers as they were learned. Their profiles' files are written anew."""
        files = {role: self._profile(deployment, role) for role in deployment.roles}
        for role, file in files.items():
            file.write_text(json.dumps(learned["profiles"][role]))
        messages = "0" if deployment.embedded else "0.2"
        return [
            *("--workers", deployment.workers, "--profile", str(files[deployment.roles[-1]])),
            *("--role-profiles", ",".join(f"{role}={file}" for role, file in files.items())),
            *("--front-ms", f"{learned['front_ms']:.3f}", "--commit-ms", f"{learned['commit_ms']:.3f}"),
            *("--message-ms", messages, "--heartbeat-interval", f"{HEARTBEAT_SECONDS:g}", "--learned"),
        ]

    def _drift(self, name: str, learned: Mapping[str, Any]) -> str:
        """How much slower the machine was at the end; nothing before it."""
        after = self.ledger.notes.get(f"after {name}")
        if after is None:
            return ""
        told = (f"{role} {pace(after[role], learned['profiles'][role]):+.0%}" for role in after)
        return (
            f"{name}: a prompt and its tokens take at the end of the runs, against what is simulated: {', '.join(told)}"
        )

    def agreements(self) -> list[Agreement]:
        """Of every run that has been measured and simulated, in the order of the cases."""
        found = []
        for case in self.options.cases:
            kept, simulated = self._runs.get(case.key), self.ledger.notes.get(f"simulated {case.key}")
            if kept is not None and simulated is not None:
                one = Agreement(
                    case=case.key,
                    deployment=case.deployment.name,
                    workload=case.mixture.name,
                    share=case.share,
                    rate=kept["rate"],
                    measured=ServedFigures(**kept["measured"]),
                    simulated=simulated_figures(simulated),
                )
                found.append(one)
        return found

    def write(self) -> None:
        """The table and JSON of what there is."""
        found, out = self.agreements(), self.options.out
        names = dict.fromkeys(case.deployment.name for case in self.options.cases)
        learned = {name: kept for name in names if (kept := self._learned(DEPLOYMENTS[name])) is not None}
        started = datetime.now(UTC).isoformat(timespec="seconds")
        loads = [kept["load"] for kept in self._runs.values()]
        scale = f"objectives × {self.options.slo_scale:g}"
        about = (
            f"{started}, commit {self._commit or 'unknown'}, {shlex.join(self.options.base)}; runs of"
            f" {self.options.seconds:g} s, {scale}, load {min(loads, default=0):.1f} to {max(loads, default=0):.1f}."
            " Measured → simulated."
        )
        lines = [about, *(f"{name}: {told_of(kept)}" for name, kept in learned.items())]
        lines += [line for name, kept in learned.items() if (line := self._drift(name, kept))]
        if found:
            lines += [agreement_table(found), summary_line(found)]
        out.with_suffix(".md").write_text("\n\n".join(lines) + "\n")
        told = [{**asdict(each), "too_far": each.too_far} for each in found]
        out.with_suffix(".json").write_text(json.dumps({"about": about, "learned": learned, "runs": told}, indent=1))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--deployments", default=",".join(DEPLOYMENTS), metavar="LIST", help="(embedded,split)")
    add("--workloads", default=",".join(MIXTURES), metavar="LIST", help="(chat,long-mixed,shared-prefix)")
    add("--shares", default="0.6,0.9", metavar="X,…", help="of what a closed loop of six gave, a run each (0.6,0.9)")
    add("--seconds", type=float, default=30.0, metavar="S", help="of arrivals in a run (30)")
    add("--slo-scale", type=float, default=2.0, metavar="X", help="multiplies every objective: cores differ (2)")
    add("--warm-up", type=float, default=8.0, metavar="S", help="of each workload, to learn from (8)")
    add("--minutes", type=float, default=12.0, metavar="M", help="begin no run after that (12)")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and lengths (0)")
    flags = "--quantization int8 --num-speculative-tokens 0"
    add("--serve-flags", default=flags, metavar="FLAGS", help=f"of every server ({flags})")
    add("--after", action="store_true", help="as --again, by what the workers had learned at the end of their runs")
    add("--again", action="store_true", help="simulate anew what was measured before")
    add(
        "--out", type=Path, default=Path("bench-simulated"), metavar="PATH", help="beginning of files (bench-simulated)"
    )
    return parser


def options_of(args: argparse.Namespace) -> SimulatedOptions:
    """Raises ValueError that names the flag."""
    for name in ("seconds", "warm_up", "minutes", "slo_scale"):
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
        again=args.again or args.after,
        after=args.after,
    )


async def measure(options: SimulatedOptions) -> int:
    """Measure and simulate; the process's exit status. Raises ServerError, ValueError, OSError."""
    twice = MeasuredTwice(options)
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


def main() -> int:
    """Run the command; the process's exit status."""
    try:
        return asyncio.run(measure(options_of(make_parser().parse_args())))
    except (ValueError, OSError, ServerError) as error:
        say(f"bench.simulated: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
