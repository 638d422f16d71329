"""What is served and simulated alike: deployments, runs, and requests as both sides take them.

Pure: it starts nothing and sends nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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

    def flags(self, folder: Path, model: Path | None = None) -> tuple[str, ...]:
        """Of `millrace serve`; what they name lies in the folder. With a `model` workers are paced: a thread each."""
        if model is not None:
            counts = () if self.embedded else tuple(word for role in self.roles for word in (f"--{role}", "1"))
            return (str(model), *counts, "--threads", "1")
        if self.embedded:
            return ("--threads", str(self.threads["mixed"]))
        return ("--placement", str(folder / f"{self.name}.toml"))


def deployments(cores: int) -> Mapping[str, ServedWorkers]:
    """What so many cores can serve by name, one of them left to the API, the router and who measures.

    Of two cores nothing is left beside a prefill and a decode worker, which seldom compute at the same time.
    """
    left = max(1, cores - 1)
    return {
        made.name: made
        for made in (
            ServedWorkers(name="embedded", threads={"mixed": left}),
            ServedWorkers(name="split", threads={"prefill": max(1, left - 1), "decode": 1}),
        )
    }


DEPLOYMENTS = deployments(len(os.sched_getaffinity(0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """One run: a deployment under a workload at a share of the rate of a closed loop of six. `round` from 1 on."""

    deployment: ServedWorkers
    mixture: Mixture
    share: float
    round: int = 1

    @property
    def case(self) -> str:
        """What its repetitions in other rounds have in common."""
        return f"{self.deployment.name}, {self.mixture.name}, {self.share:g}"

    @property
    def key(self) -> str:
        return f"{self.case}, round {self.round}"


def cases_of(args: argparse.Namespace) -> Iterator[ServedRun]:
    """Everything once, then a further round; within one the deployments take turns. Raises ValueError."""
    try:
        shares = [float(part) for part in args.shares.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ValueError(f"--shares {args.shares}: give numbers above 0, with commas between them")
    names = args.deployments.split(",")
    for name in names:
        if name not in DEPLOYMENTS:
            raise ValueError(f"--deployments {name}: there are {', '.join(DEPLOYMENTS)}")
    mixtures = [mixture_of(workload).scaled(args.slo_scale) for workload in args.workloads.split(",")]
    for number, share, mixture, name in product(range(1, args.rounds + 1), shares, mixtures, names):
        yield ServedRun(deployment=DEPLOYMENTS[name], mixture=mixture, share=share, round=number)


def noise_of(profiles: Mapping[str, Any]) -> str:
    """Of a step's logarithm by role: what the worker's own fit leaves."""
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


def slower(profiles: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """How many times as long the workers take by these profiles as by the others, in the mean of the roles."""
    return sum(1 + pace(profiles[role], others[role]) for role in others) / len(others)


def pace_line(name: str, paces: Sequence[float]) -> str:
    """By how much the machine's pace changed from run to run."""
    told = ", ".join(f"{each - 1:+.0%}" for each in paces)
    return f"{name}: a prompt and its tokens took {told} in the runs, against what was learned first"


def told_of(learned: Mapping[str, Any]) -> str:
    """What the simulator is given, in a line."""
    costs = [
        f"{told_cost(role, each['cost'])}, ±{each['cost']['error']:.0%}" for role, each in learned["profiles"].items()
    ]
    capacity = ", ".join(f"{name} {rate:.2f}" for name, rate in learned["capacity"].items())
    front = f"front {learned['front_ms']:.1f} ms, end of a handoff {learned['commit_ms']:.1f} ms"
    return f"{'; '.join(costs)}; {front}; closed loop of six, req/s: {capacity}"


def told_cost(role: str, cost: Mapping[str, float]) -> str:
    """A step cost's coefficients, in a few words."""
    return (
        f"{role} {1e3 * cost['fixed']:.2f} ms a step, {1e3 * cost['token']:.3f} a token, {1e3 * cost['sequence']:.3f} a"
        f" sequence, {1e9 * cost['pair']:.0f} ns a pair, {1e9 * cost['context']:.0f} a token of context"
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
