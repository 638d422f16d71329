"""Traffic that turns from long prompts to long answers, and `millrace autoscale` that has a worker flip meanwhile.

    python -m bench.autoscale --minutes 6 [--fleet prefill=2,decode=1] [--without] [--out PATH]

It starts `millrace serve` and `millrace autoscale` of this checkout, finds how much of either kind one worker of its
role does within the objectives, sends both phases as Poisson arrivals, and watches requests and roles. `--without`
leaves the autoscaler out. It needs four cores, of which one is its own.
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
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import orjson

from bench.connection import TransportError
from bench.contenders import Contender, parse_fleet
from bench.endpoint import ServerError
from bench.load import Pace, Run, Watch, run_load
from bench.mixture import Mixture, RequestKind
from bench.own_server import ROOT, commit, free_port
from bench.plot import Panel, sheet
from bench.sitting import BASE_FLAGS, OpenServer, open_server, settle, warm_up
from bench.standings import table
from bench.summary import SloTargets
from bench.surge import Arrived, LoadSpan, bounds, figures, timed_in_spans, windows

KEY = "MILLRACE_CLUSTER_KEY"
PROMPTS = RequestKind(name="long prompts", prompt_tokens=512, output_tokens=12, spread=0.2)
ANSWERS = RequestKind(name="long answers", prompt_tokens=48, output_tokens=160, spread=0.2)
LOOK_SECONDS = 1.0
AT_A_TIME = (1, 2, 4, 8, 12, 16, 24)
SLOWER = 2.5  # objectives over what an idle server takes, TPOT
LATER = 6.0  # and TTFT
FIRST_SHARE = 0.35  # of the time, for the first phase
SHIFT_SECONDS = 30.0  # after the shift, before anything can have been done
# The autoscaler's, so that some minutes are enough; its own defaults are for hours.
PACE = ("--interval", "3", "--scale-up-window", "12", "--scale-down-window", "30", "--cool-down", "30")


@dataclass(frozen=True, kw_only=True, slots=True)
class KindCapacity:
    """A kind with objectives, and the requests a second that meet them in a closed loop. Milliseconds."""

    kind: RequestKind
    rate: float


@dataclass(kw_only=True, slots=True)
class ShiftedTraffic:
    """What came of all requests, and how many workers of each role served, by second of the run."""

    spans: list[LoadSpan]
    kinds: tuple[RequestKind, RequestKind]
    arrived: list[Arrived] = field(default_factory=list)
    roles: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    flips: int = 0


async def closed_loop(server: OpenServer, kind: RequestKind, at_a_time: int, seconds: float) -> Run:
    """So many requests of the kind at a time, for so long."""
    plain = Mixture(name=kind.name, kinds=(replace(kind, slo=SloTargets()),))
    prepared, over = server.prepare(plain.timed(1.0, 40 + int(60 * seconds), seed=at_a_time)), asyncio.Event()
    timer = asyncio.get_running_loop().call_later(seconds, over.set)
    run = await run_load(server.endpoint, prepared, Pace(concurrency=at_a_time), Watch(interrupted=over))
    timer.cancel()
    await settle(server)
    return run


def objectives(idle: Run) -> SloTargets:
    """LATER and SLOWER times what an idle server took in the median. Milliseconds. Raises ServerError."""
    good = [outcome for outcome in idle.outcomes if outcome.error is None and outcome.tpot is not None]
    if not good:
        raise ServerError(f"an idle server answered nothing in time: {idle.outcomes[:1]}")
    ttft = sorted(outcome.ttft for outcome in good)
    tpot = sorted(outcome.tpot for outcome in good if outcome.tpot is not None)
    return SloTargets(
        ttft_ms=max(500.0, 1e3 * LATER * ttft[len(ttft) // 2]), tpot_ms=1e3 * SLOWER * tpot[len(tpot) // 2]
    )


async def capacity(server: OpenServer, kind: RequestKind, seconds: float) -> KindCapacity:
    """The most requests a second of which nine in ten meet the objectives, over closed loops of growing size."""
    found = KindCapacity(kind=kind, rate=0.0)
    for at_a_time in AT_A_TIME:
        run = await closed_loop(server, kind, at_a_time, seconds)
        if at_a_time == AT_A_TIME[0]:
            found = KindCapacity(kind=replace(kind, slo=objectives(run)), rate=0.0)
        good = [outcome for outcome in run.outcomes if outcome.error is None]
        met = sum(map(found.kind.slo.met, good)) / max(1, len(good))
        rate = len(good) / max(run.duration, seconds)
        say(f"{kind.name}: {at_a_time} at a time, {rate:.2f} a second, {met:.0%} in time")
        if met < 0.9:
            break
        found = replace(found, rate=max(found.rate, rate))
    if not found.rate:
        raise ServerError(f"{kind.name}: not even one at a time meets its objectives on this machine")
    return found


class Autoscaler:
    """`millrace autoscale` over a server of ours. Use as an async context manager; its log is at `log`."""

    def __init__(self, url: str, control: str, log: Path, more: Sequence[str]):
        own = ("--on", "router", "--url", url, "--control", control)
        self.command = [sys.executable, "-m", "deploy.cli", "autoscale", *own, *PACE, *more]
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


async def play(server: OpenServer, run: ShiftedTraffic, seed: int) -> None:
    """Send the phases, watch the workers' roles, and wait for every answer."""
    timed = timed_in_spans(run.kinds, run.spans, seed=seed)
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
            run.roles.append((loop.time() - began, counts))
        await asyncio.sleep(LOOK_SECONDS)


def phases(
    prompts: KindCapacity, answers: KindCapacity, seconds: float, fleet: dict[str, int], load: float
) -> list[LoadSpan]:
    """First what keeps the prefill workers busy and is too much for one fewer; then what is so for the decode workers.

    A few requests of the other kind come along in both. `load` is of what the right fleet would do, each worker alone.
    """
    first = load * prompts.rate
    second = load * answers.rate * (fleet["decode"] + 1) / fleet["decode"]
    return [
        LoadSpan(
            name=PROMPTS.name,
            seconds=FIRST_SHARE * seconds,
            rates={PROMPTS.name: first, ANSWERS.name: 0.1 * answers.rate},
        ),
        LoadSpan(
            name=ANSWERS.name,
            seconds=(1 - FIRST_SHARE) * seconds,
            rates={PROMPTS.name: 0.05 * prompts.rate, ANSWERS.name: second},
        ),
    ]


def verdict(run: ShiftedTraffic) -> dict[str, float]:
    """Shares of the requests offered that met their objectives, and counts."""
    (_, _, shift), (_, _, last) = bounds(run.spans)
    slo = {kind.name: kind.slo for kind in run.kinds}

    def attained(first: float, end: float) -> float:
        own = [one.outcome for one in run.arrived if first <= one.at < end]
        return sum(slo[each.kind].met(each) for each in own) / max(1, len(own))

    return {
        "attained_before": attained(0.0, shift),
        "attained_after_the_shift": attained(shift, shift + SHIFT_SECONDS),
        "attained_at_the_end": attained(last - (last - shift) / 3, last),
        "offered": float(len(run.arrived)),
        "failed": float(sum(one.outcome.error is not None for one in run.arrived)),
        "flips": float(run.flips),
    }


def markdown(run: ShiftedTraffic, title: str) -> str:
    """What became of each kind in each phase, and the verdict."""
    rows = []
    for one in figures(run.arrived, run.kinds, run.spans):
        ttft, tpot = sorted(one.ttft), sorted(one.tpot)
        span = next(span for span in run.spans if span.name == one.span)
        spread = f"{1e3 * ttft[len(ttft) // 2]:.0f} / {1e3 * ttft[int(0.9 * len(ttft))]:.0f}" if ttft else "—"
        token = f"{1e3 * tpot[len(tpot) // 2]:.1f} / {1e3 * tpot[int(0.9 * len(tpot))]:.1f}" if tpot else "—"
        counts = [str(count) for count in (one.offered, one.completed, one.refused, one.failed)]
        rows.append(
            [one.kind, one.span, f"{span.rates[one.kind]:.2f}", *counts, f"{one.attainment:.1%}", spread, token]
        )
    heads = ["kind", "phase", "offered/s", "offered", "answered", "refused", "failed", "attained"]
    first = table([*heads, "TTFT p50 / p90, ms", "TPOT p50 / p90, ms"], rows)
    second = table(["figure", "value"], [[name, f"{value:.3g}"] for name, value in verdict(run).items()])
    goals = "; ".join(
        f"{kind.name} {kind.prompt_tokens}/{kind.output_tokens}, {kind.slo.describe()}" for kind in run.kinds
    )
    return "\n\n".join([f"{title} Objectives: {goals}.", first, second]) + "\n"


def drawing(run: ShiftedTraffic, title: str) -> str:
    """Attainment of both kinds and the workers of each role over time, as SVG."""
    (_, _, shift), (_, _, last) = bounds(run.spans)
    attained = {
        kind.name: [(at + 2.5, 100 * share) for at, share in windows(run.arrived, kind, 0.0, last, step=2.0)]
        for kind in run.kinds
    }
    roles = {role: [(at, float(counts[role])) for at, counts in run.roles] for role in ("prefill", "decode")}
    panels = [
        Panel(
            title="requests within both objectives, %", x_label="seconds", curves=attained, limit=90.0, changes=[shift]
        ),
        Panel(title="workers that serve", x_label="seconds", curves=roles, changes=[shift]),
    ]
    return sheet(title, panels, [*attained, *roles])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.autoscale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=6.0, metavar="M", help="of both phases together (6)")
    add("--fleet", default="prefill=2,decode=1", metavar="prefill=N,decode=N", help="to begin with")
    add("--serve-flags", default="", metavar="FLAGS", help="more flags of the server")
    add("--autoscale-flags", default="", metavar="FLAGS", help="more flags of the autoscaler")
    add("--without", action="store_true", help="the same traffic without an autoscaler")
    add("--load", type=float, default=0.75, metavar="X", help="of what workers do that share no core (0.75)")
    add("--seed", type=int, default=0, metavar="N", help="of the traffic (0)")
    add("--warm-up", type=float, default=10.0, metavar="S", help="seconds of each kind, so that workers learn (10)")
    add("--closed-loop", type=float, default=10.0, metavar="S", help="seconds of each, for the capacities (10)")
    add("--out", type=Path, default=Path("bench-autoscale"), metavar="PATH", help="beginning of files (this one)")
    return parser


async def autoscaled(args: argparse.Namespace) -> ShiftedTraffic:
    """Start, measure, play. Raises ServerError, ValueError."""
    _, fleet = parse_fleet(args.fleet)
    counts = {flag.removeprefix("--"): int(value) for flag, value in zip(fleet[::2], fleet[1::2], strict=True)}
    if not (counts.get("prefill", 0) > 1 and counts.get("decode", 0) > 0):
        raise ValueError(f"--fleet {args.fleet}: one prefill worker flips, so give two or more, and a decode worker")
    os.environ.setdefault(KEY, secrets.token_hex(16))
    port = free_port()
    contender = Contender(name="autoscale", flags=(*fleet, "--grpc-port", str(port)))
    mixture = Mixture(name="autoscale", kinds=(PROMPTS, ANSWERS))
    base = [*BASE_FLAGS, *shlex.split(args.serve_flags)]
    async with AsyncExitStack() as stack:
        server = await open_server(contender, mixture, stack, base=base, folder=args.out.parent)
        for kind in (PROMPTS, ANSWERS):
            await warm_up(server, Mixture(name=kind.name, kinds=(kind,)), args.warm_up)
        prompts, answers = [await capacity(server, kind, args.closed_loop) for kind in (PROMPTS, ANSWERS)]
        run = ShiftedTraffic(
            spans=phases(prompts, answers, 60.0 * args.minutes, counts, args.load), kinds=(prompts.kind, answers.kind)
        )
        if not args.without:
            limits = (*("--prefill", "1:", "--decode", "1:"), "--most-workers", str(sum(counts.values())))
            log, more = args.out.with_suffix(".autoscaler.log"), shlex.split(args.autoscale_flags)
            url = server.endpoint.target.url
            await stack.enter_async_context(Autoscaler(url, f"127.0.0.1:{port}", log, [*limits, *more]))
        await play(server, run, args.seed)
    return run


def conclude(run: ShiftedTraffic, args: argparse.Namespace) -> int:
    """Write the files, print the tables; 0 where nothing failed and, with an autoscaler, a role changed."""
    title = f"{datetime.now(UTC).isoformat(timespec='seconds')}, commit {commit()}. {args.fleet}"
    title += f"{' without an autoscaler' if args.without else ''} {args.serve_flags}".rstrip() + "."
    args.out.with_suffix(".md").write_text(markdown(run, title))
    args.out.with_suffix(".svg").write_text(drawing(run, "Long prompts, then long answers: a worker flips"))
    told = {
        "title": title,
        "spans": [asdict(span) for span in run.spans],
        "figures": [asdict(one) for one in figures(run.arrived, run.kinds, run.spans)],
        "verdict": verdict(run),
        "roles": run.roles,
    }
    args.out.with_suffix(".json").write_text(json.dumps(told, indent=1))
    print(markdown(run, title))
    found = verdict(run)
    return int(found["failed"] > 0 or (not args.without and not found["flips"]))


def main() -> int:
    args = arguments().parse_args()
    try:
        return conclude(asyncio.run(autoscaled(args)), args)
    except (ServerError, ValueError, OSError) as error:
        say(f"bench.autoscale: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
