"""How near predictions of TPOT come before and after long prompts join the chats, and how near they could come.

    python -m deploy.simulator.tpot_bound --seeds 3
    python -m deploy.simulator.tpot_bound --seeds 3 --drafts 0.5

The bound is a regression over what is known when a request is placed, fitted to the other seeds; and over what came
only later, which nobody can know. It measures the policy that serves, on virtual time, and decides nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

import numpy as np

from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.drafts import DraftModel
from deploy.simulator.profiles import PROFILES
from deploy.simulator.run import simulate
from deploy.simulator.traffic import Arrival, Lengths, Traffic, TrafficClass, trace
from router.goodput import Goodput
from router.policy import Decision, Demand, FleetView
from serving.messages import Role

PROFILE = PROFILES["cpu-smollm2-int8"]
CHAT = TrafficClass(name="interactive", prompt=Lengths(256, 0.3), output=Lengths(128, 0.3), ttft_ms=1e3, tpot_ms=40.0)
LONG = TrafficClass(share=0.3, prompt=Lengths(1500, 0.1), output=Lengths(32, 0.1), ttft_ms=6e3, tpot_ms=40.0)
STEADY, CHANGED = Traffic(name="chats", classes=(CHAT,)), Traffic(name="both", classes=(replace(CHAT, share=0.7), LONG))
RATES, SECONDS = (1.6, 1.3), 175.0  # requests a second before the change and after it, which comes then
PHASES = {"steady": (SECONDS / 2, SECONDS), "changed": (1.3 * SECONDS, 2 * SECONDS)}  # once learned
LONG_TOKENS = 900
REWEIGHTED = 60  # times, until least squares have become least absolute deviations


@dataclass(slots=True, kw_only=True)
class PlacedText:
    """One request: what was known of its decode when it was placed, what came, and what came beside it."""

    at: float
    worker: str
    tokens: int
    raw: float  # seconds a token, before corrections
    predicted: float
    told: float  # what is usual
    step: float
    rows: int
    share: float
    observed: float = 0.0
    ended: float = 0.0
    first_token: float = 0.0
    there: int = 0  # long prompts at its worker that had no first token when it was placed
    later: int = 0  # that came to it afterwards
    beside: float = 0.0  # the share of its decode in which there was any of these, summed over them

    def overlap(self, others: Sequence[PlacedText]) -> None:
        """Fill in what other requests' prompts were beside it."""
        for other in others:
            if other.worker != self.worker or other.tokens < LONG_TOKENS or other.first_token <= self.at:
                continue
            self.there += other.at < self.at
            self.later += self.at < other.at < self.ended
            both = min(self.ended, other.first_token) - max(self.at, other.at)
            self.beside += max(0.0, both) / max(1e-9, self.ended - self.at)


class WatchedGoodput(Goodput):
    """The policy that serves, and what came of each of its choices."""

    def __init__(self, policy: Goodput):
        super().__init__(policy.calibration)
        self.made: dict[int, tuple[Decision, PlacedText]] = {}

    def choose(self, demand: Demand, view: FleetView, now: float) -> Decision | None:
        decision = super().choose(demand, view, now)
        if decision is not None and decision.predicted is not None and decision.decode is not None:
            there, told = decision.decode, decision.predicted
            known = PlacedText(
                at=now,
                worker=there.status.name,
                tokens=demand.tokens,
                raw=told.token,
                predicted=told.tpot,
                told=told.usual_tpot or told.tpot,
                step=told.step,
                rows=there.held_leases,
                share=there.prompt_share,
            )
            self.made[id(decision)] = decision, known
        return decision

    def observed(
        self,
        decision: Decision,
        *,
        ttft: float | None = None,
        tpot: float | None = None,
        step_tokens: float | None = None,
    ) -> None:
        super().observed(decision, ttft=ttft, tpot=tpot, step_tokens=step_tokens)
        if id(decision) in self.made:
            known = self.made[id(decision)][1]
            known.first_token = known.at + ttft if ttft is not None else known.first_token
            if tpot is not None:
                known.observed, known.ended = tpot, asyncio.get_running_loop().time()


def recorded(plan: ClusterPlan, seed: int) -> list[PlacedText]:
    """Of every request that decoded, on two workers whose load changes after SECONDS."""
    watched: list[WatchedGoodput] = []

    async def watch(cluster: SimulatedCluster) -> None:
        for placer in cluster.placers:
            assert isinstance(placer.policy, Goodput)
            placer.policy = WatchedGoodput(placer.policy)
            watched.append(placer.policy)

    arrivals: list[Arrival] = []
    for number, (traffic, rate) in enumerate(zip((STEADY, CHANGED), RATES, strict=True)):
        drawn = trace(traffic, plan.profile, round(rate * SECONDS), 1000 * number + seed)
        arrivals += [replace(each, at=each.at / rate + number * SECONDS) for each in drawn]
    simulate(plan, arrivals, 1.0, seed=seed, watch=watch)
    found = [known for _, known in watched[0].made.values() if known.first_token]
    for known in found:
        known.overlap(found)
    return [known for known in found if known.observed]


Features = Callable[[PlacedText], list[float]]


def at_placement(known: PlacedText) -> list[float]:
    return [1.0, log(known.raw), log(known.step), known.rows, known.share, known.there]


BOUNDS: dict[str, Features] = {
    "a constant": lambda known: [1.0],
    "all that is known at placement": at_placement,
    "and how many long prompts came later": lambda known: [*at_placement(known), *(known.later > n for n in range(3))],
    "and for how long they were beside it": lambda known: [*at_placement(known), known.beside, known.later],
}


def least_deviations(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Coefficients with the least Σ|rows · coefficients − wanted|, by least squares that are weighted anew."""
    weights: np.ndarray = np.ones(len(wanted))
    found: np.ndarray = np.zeros(rows.shape[1])
    for _ in range(REWEIGHTED):
        found = np.linalg.lstsq(rows * weights[:, None], wanted * weights, rcond=None)[0]
        weights = 1.0 / np.sqrt(np.maximum(1e-3, np.abs(rows @ found - wanted)))
    return found


def bound(runs: Sequence[Sequence[PlacedText]], features: Features) -> float:
    """The median of |fitted / observed - 1|, each run predicted by what is fitted to the others."""
    errors: list[float] = []
    for number, run in enumerate(runs):
        others = [known for other, each in enumerate(runs) if other != number for known in each]
        learned = least_deviations(
            np.array([features(known) for known in others], dtype=float),
            np.array([log(known.observed) for known in others]),
        )
        errors += [abs(exp(np.array(features(known)) @ learned) / known.observed - 1) for known in run]
    return median(errors)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.simulator.tpot_bound",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs, at least two (3)")
    parser.add_argument("--drafts", type=float, metavar="SHARE", help="draft tokens, of which this share is right")
    parser.add_argument("--noise", type=float, default=0.1, help="of a step's time, as a logarithm (0.1)")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds: at least 2, each is predicted by the others")
    plan = ClusterPlan.of(PROFILE, (Role.MIXED,) * 2, "goodput", noise=options.noise, heartbeat_interval=1.0)
    plan = plan.with_drafts(DraftModel(right=options.drafts)) if options.drafts is not None else plan
    runs = [recorded(plan, seed) for seed in range(options.seeds)]
    for phase, (begin, end) in PHASES.items():
        chats = [[known for known in run if begin <= known.at < end and known.tokens < LONG_TOKENS] for run in runs]
        every = [known for run in chats for known in run]
        print(f"{phase}, {len(every)} chats: median error of TPOT")
        print(f"  as predicted, a mean: {median(abs(known.predicted / known.observed - 1) for known in every):.1%}")
        print(f"  as told, what is usual: {median(abs(known.told / known.observed - 1) for known in every):.1%}")
        for name, features in BOUNDS.items():
            print(f"  {name}: {bound(chats, features):.1%}")
        for later in range(3):
            paces = [known.observed for known in every if min(2, known.later) == later]
            if paces:
                came = f"{later}{' or more' if later == 2 else ''}"
                print(f"  {len(paces)} chats with {came} long prompts later: {1e3 * median(paces):.1f} ms a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
