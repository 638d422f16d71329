"""What is served and simulated alike: deployments, runs, and requests as both sides take them.

Pure: it starts nothing and sends nothing.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.mixture import Mixture, TimedAsk, mixture_of
from bench.sse import Outcome
from bench.workload import PIECE_RANGE, Ask
from serving.step_cost import StepCost, StepLoad

WARM_TEXTS = 12  # of the shared ones: about as many as a worker's KV holds beside what runs
PRELUDE_SECONDS = 10.0  # from one of its requests to the next, when they are simulated: each is alone


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWorkers:
    """What is served and simulated: one worker of each of the roles, and how many threads each computes with."""

    name: str
    threads: Mapping[str, int]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.threads)

    @property
    def embedded(self) -> bool:
        """One worker, in the API's own process."""
        return self.roles == ("mixed",)

    @property
    def workers(self) -> str:
        """As `millrace simulate` takes them."""
        return ",".join(f"{role}=1" for role in self.roles)

    @property
    def placement(self) -> str:
        """A placement file of workers that are processes of their own."""
        groups = (f'[[workers]]\nrole = "{role}"\nthreads = {count}\n' for role, count in self.threads.items())
        return "\n".join(groups)

    def flags(self, folder: Path) -> tuple[str, ...]:
        """Of `millrace serve`; what they name lies in the folder."""
        if self.embedded:
            return ("--threads", str(self.threads["mixed"]))
        return ("--placement", str(folder / f"{self.name}.toml"))


# Of four cores, one is left to the API, the router and who measures.
DEPLOYMENTS: Mapping[str, ServedWorkers] = {
    made.name: made
    for made in (
        ServedWorkers(name="embedded", threads={"mixed": 3}),
        ServedWorkers(name="split", threads={"prefill": 2, "decode": 1}),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """One run: a deployment under a workload at a share of the rate that a closed loop of six gave."""

    deployment: ServedWorkers
    mixture: Mixture
    share: float

    @property
    def key(self) -> str:
        return f"{self.deployment.name}, {self.mixture.name}, {self.share:g}"


def cases_of(args: argparse.Namespace) -> Iterator[ServedRun]:
    """One deployment after the other, all workloads at a share before the next share. Raises ValueError."""
    try:
        shares = [float(part) for part in args.shares.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ValueError(f"--shares {args.shares}: give numbers above 0, with commas between them")
    for name in args.deployments.split(","):
        if name not in DEPLOYMENTS:
            raise ValueError(f"--deployments {name}: there are {', '.join(DEPLOYMENTS)}")
        for share in shares:
            for workload in args.workloads.split(","):
                yield ServedRun(
                    deployment=DEPLOYMENTS[name], mixture=mixture_of(workload).scaled(args.slo_scale), share=share
                )


def noise_of(learned: Mapping[str, Any]) -> str:
    """Of a step's logarithm by role: what the worker's own fit leaves."""
    profiles: Mapping[str, Any] = learned["profiles"]
    return ",".join(f"{role}={profile['cost']['error']:.4f}" for role, profile in profiles.items())


def mean_profile(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One worker's profiles as one: costs in the mean, since each is at the pace of the last steps before it."""
    costs = [reading["cost"] for reading in readings]
    return {**readings[-1], "cost": {name: sum(cost[name] for cost in costs) / len(costs) for name in costs[0]}}


def pace(profile: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """By which share a prompt of 256 tokens and 64 tokens after it take longer than by the other profile."""
    load = StepLoad.of(0, 256)
    seconds = []
    for one in (profile, other):
        cost = StepCost(**one["cost"])
        seconds.append(cost.seconds(load) + 64 * cost.decode_seconds(1, 288))
    return seconds[0] / seconds[1] - 1


def told_of(learned: Mapping[str, Any]) -> str:
    """What the simulator is given, in a line."""
    costs = [_told_cost(role, profile["cost"]) for role, profile in learned["profiles"].items()]
    capacity = ", ".join(f"{name} {rate:.2f}" for name, rate in learned["capacity"].items())
    front = f"front {learned['front_ms']:.1f} ms, end of a handoff {learned['commit_ms']:.1f} ms"
    return f"{'; '.join(costs)}; {front}; closed loop of six, req/s: {capacity}"


def _told_cost(role: str, cost: Mapping[str, float]) -> str:
    return (
        f"{role} {1e3 * cost['fixed']:.2f} ms a step, {1e3 * cost['token']:.3f} a token, {1e3 * cost['sequence']:.3f} a"
        f" sequence, {1e9 * cost['pair']:.0f} ns a pair, {1e9 * cost['context']:.0f} a token of context,"
        f" ±{cost['error']:.0%}"
    )


def salted(timed: Sequence[TimedAsk], salt: str) -> list[TimedAsk]:
    """The same with other tokens: what is shared within a run is shared with no other, and nothing is cached yet."""
    mask = zlib.crc32(salt.encode()) % PIECE_RANGE
    return [replace(one, ask=replace(one.ask, pieces=tuple(piece ^ mask for piece in one.ask.pieces))) for one in timed]


def prelude(timed: Sequence[TimedAsk]) -> list[TimedAsk]:
    """Requests for a token each that bring the first of the shared texts into a cache, before the others come."""
    firsts: dict[tuple[int, ...], TimedAsk] = {}
    for one in timed:
        if one.kind.prefix_tokens:
            firsts.setdefault(one.ask.pieces[: one.kind.prefix_tokens], one)
    chosen = list(firsts.items())[:WARM_TEXTS]
    return [
        TimedAsk(PRELUDE_SECONDS * (number - len(chosen)), one.kind, Ask(pieces=(*text, number), output_tokens=1))
        for number, (text, one) in enumerate(chosen)
    ]


def row_of(asked: TimedAsk, outcome: Outcome, *, counted: bool = True) -> dict[str, Any]:
    """A request as `millrace simulate --trace` reads it, with what was measured of it."""
    kind, good = asked.kind, outcome.error is None
    prefix = asked.ask.pieces[: kind.prefix_tokens]
    tpot = outcome.tpot if good else None
    return {
        "arrival_s": asked.at + PRELUDE_SECONDS * WARM_TEXTS,  # since the prelude, where there is one
        "prompt_tokens": asked.ask.prompt_tokens,
        "output_tokens": asked.ask.output_tokens,
        "service_class": kind.service_class or "standard",
        "ttft_slo_ms": kind.slo.ttft_ms,
        "tpot_slo_ms": kind.slo.tpot_ms,
        "prefix": f"{zlib.crc32(repr(prefix).encode()):08x}" if prefix else None,
        "prefix_tokens": len(prefix) or None,
        "ttft_ms": 1e3 * outcome.ttft if good else None,
        "tpot_ms": None if tpot is None else 1e3 * tpot,
        "error": outcome.error,
        "counted": counted,
    }
