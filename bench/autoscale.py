"""Traffic that turns from long prompts to long answers, and `millrace autoscale` that has a worker flip meanwhile.

    python -m bench.autoscale [--minutes 3] [--only with] [--together] [--out PATH]

Three runs of the same traffic on real processes, one after the other: with the autoscaler; without it; and, from the
shift on, with the roles it ought to come to. Workers are paced (scripts.paced): a step of theirs lasts as long as on a
device of its own, so that a flip gives a role what one worker does, on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import torch

from bench.connection import TransportError
from bench.contenders import Contender, parse_fleet
from bench.endpoint import ServerError
from bench.load import Pace, Watch, run_load
from bench.mixture import Mixture
from bench.own_server import ROOT, commit, free_port
from bench.random_folder import write_folder
from bench.shifted import (
    AUTOSCALED,
    FIXED,
    KINDS,
    PACE,
    RIGHT,
    STEP_TOKENS,
    ShiftedTraffic,
    drawing,
    markdown,
    phases,
    verdict,
)
from bench.sitting import OpenServer, open_server, settle, warm_up
from bench.surge import Arrived, timed_in_spans

KEY = "MILLRACE_CLUSTER_KEY"
PACE_VARIABLE = "BENCH_PACE"  # of scripts.paced
RUNS = {"with": AUTOSCALED, "without": FIXED, "reference": RIGHT}
LOOK_SECONDS = 1.0
MISSES = 12  # requests of a run that are explained
FLAGS = (
    *("--kernels", "torch", "--threads", "1", "--num-kv-blocks", "2048", "--num-speculative-tokens", "0"),
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--served-model-name", "paced", "--log-level", "info"),
)
# The autoscaler's, so that some minutes are enough; its own defaults are for hours.
TURNS = ("--interval", "3", "--scale-up-window", "12", "--scale-down-window", "30", "--cool-down", "30")


class Autoscaler:
    """`millrace autoscale` over a server of ours. Use as an async context manager; its log is at `log`."""

    def __init__(self, url: str, control: str, log: Path, more: Sequence[str]):
        own = ("--on", "router", "--url", url, "--control", control)
        self.command = [sys.executable, "-m", "deploy.cli", "autoscale", *own, *TURNS, *more]
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Autoscaler:
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raises ServerError where it had ended by itself."""
        assert self._process is not None
        if self._process.returncode is not None:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ServerError(f"millrace autoscale ended with {self._process.returncode}: {last}; see {self.log}")
        self._process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 20.0)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftPlan:
    """One run: `fleet` to begin with, as numbers by role; `model` is a folder."""

    name: str
    fleet: dict[str, int]
    model: Path
    out: Path
    autoscale_flags: Sequence[str] = ()

    @property
    def log(self) -> Path:
        short = next(short for short, name in RUNS.items() if name == self.name)
        return self.out.with_name(f"{self.out.name}.{short}.log")


async def performed(plan: ShiftPlan, run: ShiftedTraffic, args: argparse.Namespace) -> ShiftedTraffic:
    """Start the fleet, let it learn, and send the run's traffic. Raises ServerError."""
    port, count = free_port(), sum(plan.fleet.values())
    roles = tuple(word for role, number in plan.fleet.items() for word in (f"--{role}", str(number)))
    contender = Contender(name=plan.log.stem, flags=(str(plan.model), *roles, "--grpc-port", str(port)))
    base = (*FLAGS, *shlex.split(args.serve_flags))
    async with AsyncExitStack() as stack:
        mixture = Mixture(name="shift", kinds=KINDS)
        server = await open_server(contender, mixture, stack, base=base, folder=args.out.parent, module="scripts.paced")
        for kind in KINDS:
            await warm_up(server, Mixture(name=kind.name, kinds=(kind,)), args.warm_up)
        if plan.name == AUTOSCALED:
            limits = ("--prefill", "1:", "--decode", "1:", "--most-workers", str(count), *plan.autoscale_flags)
            log, url = plan.out.with_name(f"{plan.out.name}.autoscaler.log"), server.endpoint.target.url
            await stack.enter_async_context(Autoscaler(url, f"127.0.0.1:{port}", log, limits))
        await play(server, run, args.seed)
        told = await explained(server, run)
        plan.log.with_suffix(".misses.json").write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))
    return run


async def play(server: OpenServer, run: ShiftedTraffic, seed: int) -> None:
    """Send the phases, watch the workers' roles, and wait for every answer."""
    timed = timed_in_spans(KINDS, run.spans, seed=seed)
    prepared, arrivals = server.prepare(timed), tuple(one.at for one in timed)
    began = server.endpoint.client.clock()
    looking = asyncio.create_task(_look(server, run), name="look")
    try:
        sent = await run_load(server.endpoint, prepared, Pace(arrivals=arrivals), Watch())
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    run.arrived = [Arrived(outcome.scheduled - began, outcome) for outcome in sent.outcomes]
    await settle(server)
    text = (await server.endpoint.client.get("/metrics")).body.decode()
    run.flips = round(sum(map(float, re.findall(r"^millrace:role_flips_total{.*} (\S+)$", text, re.MULTILINE))))


async def _look(server: OpenServer, run: ShiftedTraffic) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        with suppress(TransportError, orjson.JSONDecodeError, KeyError):
            answer = await server.endpoint.client.get("/v1/workers")
            live = [each for each in orjson.loads(answer.body)["workers"] if each["state"] == "live"]
            counts = {role: sum(each["role"] == role for each in live) for role in ("prefill", "decode", "mixed")}
            run.roles.append((run.begins + loop.time() - began, counts))
        await asyncio.sleep(LOOK_SECONDS)


async def explained(server: OpenServer, run: ShiftedTraffic) -> list[object]:
    """The last requests that missed an objective, as the server explains them, with the second they came at."""
    goals = {kind.name: kind.slo for kind in KINDS}
    missed = [one for one in run.arrived if one.outcome.id and not goals[one.outcome.kind].met(one.outcome)]
    found: list[object] = []
    for one in missed[-MISSES:]:
        with suppress(TransportError, orjson.JSONDecodeError):
            answer = await server.endpoint.client.get(f"/v1/requests/{one.outcome.id}/explain")
            found.append({"at": round(one.at, 2), "kind": one.outcome.kind, "told": orjson.loads(answer.body)})
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.autoscale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, metavar="M", help="of both phases together (3)")
    add("--fleet", default="prefill=2,decode=1", metavar="prefill=N,decode=N", help="to begin with")
    add("--only", choices=RUNS, action="append", help="this run alone; may be given again")
    add("--together", action="store_true", help="all runs at the same time, where cores are plenty")
    add("--load", type=float, default=0.65, metavar="X", help="of the role that a phase needs, by the pace (0.65)")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of the servers")
    add("--autoscale-flags", default="", metavar="FLAGS", help="more flags of the autoscaler")
    add("--seed", type=int, default=0, metavar="N", help="of the traffic (0)")
    add("--warm-up", type=float, default=8.0, metavar="S", help="seconds of each kind, so that workers learn (8)")
    add("--out", type=Path, default=Path("bench-autoscale"), metavar="PATH", help="beginning of files (this one)")
    add("--plot", type=Path, metavar="FILE", help="where the picture goes (PATH.svg)")
    return parser


async def compared(args: argparse.Namespace, folder: Path) -> list[ShiftedTraffic]:
    """All runs asked for. Raises ServerError, ValueError."""
    _, flags = parse_fleet(args.fleet)
    fleet = {flag.removeprefix("--"): int(value) for flag, value in zip(flags[::2], flags[1::2], strict=True)}
    if not (fleet.get("prefill", 0) > 1 and fleet.get("decode", 0) > 0):
        raise ValueError(f"--fleet {args.fleet}: one prefill worker flips, so give two or more, and a decode worker")
    os.environ.setdefault(KEY, secrets.token_hex(16))
    os.environ[PACE_VARIABLE] = json.dumps(asdict(PACE))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # what paced workers learn is not what others do
    torch.manual_seed(0)
    write_folder(folder / "model", "mini", "bfloat16", torch.device("cpu"))
    spans = phases(60.0 * args.minutes, fleet, args.load)
    right = {"prefill": fleet["prefill"] - 1, "decode": fleet["decode"] + 1}
    todo = []
    for short, name in RUNS.items():
        if args.only and short not in args.only:
            continue
        run = ShiftedTraffic(name=name, spans=spans[-1:] if name == RIGHT else spans)
        run.begins = spans[0].seconds if name == RIGHT else 0.0
        own = right if name == RIGHT else fleet
        more = shlex.split(args.autoscale_flags)
        plan = ShiftPlan(name=name, fleet=own, model=folder / "model", out=args.out, autoscale_flags=more)
        todo.append(performed(plan, run, args))
    if args.together:
        return list(await asyncio.gather(*todo))
    return [await each for each in todo]


def conclude(runs: Sequence[ShiftedTraffic], args: argparse.Namespace) -> int:
    """Write the files, print the tables; 0 where they show that attainment recovers and nothing failed."""
    title = f"{datetime.now(UTC).isoformat(timespec='seconds')}, commit {commit()}. {args.fleet} {args.serve_flags}"
    title = f"{title.rstrip()}, --load {args.load:g}, load of the machine {os.getloadavg()[1]:.1f}."
    text = markdown(runs, title)
    args.out.with_name(f"{args.out.name}.md").write_text(text)
    plot = args.plot or args.out.with_name(f"{args.out.name}.svg")
    plot.write_text(drawing(runs, "Long prompts, then long answers: a worker flips"))
    told = {
        "title": title,
        "verdict": asdict(verdict(runs)),
        "runs": [{"name": run.name, "roles": run.roles} for run in runs],
    }
    args.out.with_name(f"{args.out.name}.json").write_text(json.dumps(told, indent=1))
    print(text)
    return int(bool(verdict(runs).complaints))


def main() -> int:
    args = arguments().parse_args()
    try:
        with TemporaryDirectory() as folder:
            return conclude(asyncio.run(compared(args, Path(folder))), args)
    except (ServerError, ValueError, OSError) as error:
        print(f"bench.autoscale: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
