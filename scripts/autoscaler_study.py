"""What the autoscaler does in the simulator: the picture of docs/autoscaler.md, its thresholds, and a forecast's worth.

    python -m scripts.autoscaler_study flip docs/img/autoscaler-flip.svg
    python -m scripts.autoscaler_study thresholds
    python -m scripts.autoscaler_study forecast --seeds 3

It measures and draws; what is decided is decided by deploy.autoscaler.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise, product
from math import pi, sin
from pathlib import Path

import numpy as np

from deploy.autoscaler.fleet_load import ScaledFleet
from deploy.autoscaler.limits import AutoscalerLimits
from deploy.autoscaler.observation import TOTALS, Observation
from deploy.autoscaler.policy import AddWorker, DrainWorker, FlipWorker, ScalingDecision, decide
from deploy.simulator.autoscaled import AutoscaledRun, TrafficPhase, autoscaled, phased
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import Fitted, Profile, profile_of
from deploy.simulator.traffic import Lengths, Traffic, TrafficClass
from router.offered import OfferedWork
from serving.messages import Role
from serving.step_cost import StepCost

P, D = Role.PREFILL, Role.DECODE
# A tenth as fast as one thread of a CPU with SmolLM2: an hour of it has few tokens.
SLOW = Profile(
    name="slow",
    model="slow",
    steps=Fitted(StepCost(fixed=0.1, token=0.004, pair=1e-6, sequence=0.02, context=1e-5, error=0.1)),
    kv_tokens=16_384,
    kv_bytes=131_072,
    layers=32,
    max_num_seqs=64,
)


def kind(prompt: float, output: float, ttft_ms: float, tpot_ms: float) -> Traffic:
    drawn = Lengths(prompt, 0.3), Lengths(output, 0.3)
    made = TrafficClass(prompt=drawn[0], output=drawn[1], ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    return Traffic(name=f"{prompt:g}+{output:g}", classes=(made,))


# ---- a role flips --------------------------------------------------------------------------------------------------

NAMES = {FlipWorker: "flip", DrainWorker: "drain", AddWorker: "add"}
SHIFT_AT, END, BIN = 180.0, 540.0, 15.0


def shifted(dry_run: bool) -> AutoscaledRun:
    """Prompts of 800 tokens, then outputs of 250, on one thread of a CPU a worker: four, and no fifth."""
    plan = ClusterPlan.of(profile_of("cpu-smollm2-int8"), (P, P, P, D), "goodput", heartbeat_interval=1.0)
    heavy, light = kind(800, 32, 4000.0, 30.0), kind(100, 250, 4000.0, 30.0)
    phases = [
        TrafficPhase(traffic=heavy, rate=2.0, seconds=SHIFT_AT),
        TrafficPhase(traffic=light, rate=3.0, seconds=END - SHIFT_AT),
    ]
    return autoscaled(plan, phased(phases, plan, 1), AutoscalerLimits(most_workers=4), dry_run=dry_run)


def flip(path: Path) -> None:
    with ProcessPoolExecutor(2) as pool:
        scaled, fixed = pool.map(shifted, (False, True))
    for at, decision in scaled.actions:
        print(f"{at:.0f} s: {decision.action}: {decision.reason}; {decision.shift}")
    for name, each in (("autoscaled", scaled), ("as it was", fixed)):
        outcomes = each.run.outcomes
        parts = [share(outcomes, *span) for span in ((0, SHIFT_AT), (SHIFT_AT, 300), (300, END))]
        failed = sum(outcome.error is not None or outcome.finish is None for outcome in outcomes)
        print(f"{name}: {len(outcomes)} requests, {failed} failed; attainment before, until 300 s, after:", *parts)
    draw(scaled, fixed, path)


def share(outcomes: Sequence[RequestOutcome], begin: float, end: float) -> float:
    met = [outcome.met for outcome in outcomes if begin <= outcome.arrived < end]
    return round(sum(met) / len(met), 3) if met else float("nan")


def draw(scaled: AutoscaledRun, fixed: AutoscaledRun, path: Path) -> None:
    """Attainment over time with and without flips, the load of each role, and how many workers it has."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(7.2, 7.2), sharex=True, layout="constrained")
    bins = np.arange(0, END, BIN)
    for run, colour, label in ((scaled, "#0072b2", "autoscaled"), (fixed, "#d55e00", "three prefill, one decode")):
        shares = [100 * share(run.run.outcomes, at, at + BIN) for at in bins]
        top.plot(bins + BIN / 2, shares, color=colour, label=label)
    top.set_ylabel("both objectives met, %")
    for role, colour in ((P, "#009e73"), (D, "#cc79a7")):
        loads = [(at, each.load.used(role)) for at, each in scaled.decisions if each.load is not None]
        middle.plot(*zip(*loads, strict=True), ".-", color=colour, label=f"load of {role} workers")
        counts = [
            (at, sum(each.role is role and each.state == "ready" for each in fleet)) for at, fleet in scaled.fleets
        ]
        bottom.step(*zip(*counts, strict=True), where="post", color=colour, label=f"{role} workers")
    limits = AutoscalerLimits()
    middle.axhline(limits.scale_up, color="grey", linestyle=":", label="scale up")
    bottom.set_xlabel("seconds")
    for axes in (top, middle, bottom):
        axes.axvline(SHIFT_AT, color="black", linewidth=0.8)
        for at, decision in scaled.actions:
            axes.axvline(at, color="grey", linewidth=0.8, linestyle="--")
            axes.text(at, 0, f"{NAMES[type(decision.action)]} ", rotation=90, va="bottom", ha="right", fontsize="small")
        axes.set_ylim(bottom=0)
        axes.legend(loc="best", fontsize="small")
    top.set_title(f"At {SHIFT_AT:.0f} s prompts become short and outputs long", fontsize="medium")
    figure.savefig(path, metadata={"Date": None})


# ---- thresholds ----------------------------------------------------------------------------------------------------

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FULL = {P: (800, 4, 1.23), D: (64, 200, 3.0)}  # lengths, and requests/s that fill one worker by its cost model
WATCHED = 150.0


def loaded(case: tuple[Role, float, int]) -> tuple[float, float, float]:
    """The load as the policy sees it, and shares of requests that met TTFT and TPOT; two workers of the role."""
    role, load, seed = case
    prompt, output, full = FULL[role]
    roles = (P, P, D) if role is P else (P, D, D)
    plan = ClusterPlan.of(profile_of("cpu-smollm2-int8"), roles, "goodput", heartbeat_interval=1.0)
    traffic = kind(prompt, output, 4000.0 if role is P else 2000.0, 30.0)
    arrivals = phased([TrafficPhase(traffic=traffic, rate=2 * load * full, seconds=WATCHED)], plan, seed)
    run = autoscaled(plan, arrivals, AutoscalerLimits(most_workers=3), dry_run=True)
    seen = [each.load.used(role) for _, each in run.decisions if each.load is not None]
    outcomes = [outcome for outcome in run.run.outcomes if outcome.arrived > 30]
    slo = outcomes[0].request.slo
    ttft = [(outcome.ttft or 1e9) * 1e3 <= (slo.ttft_ms or 0) for outcome in outcomes]
    tpot = [(outcome.tpot or 0) * 1e3 <= (slo.tpot_ms or 0) for outcome in outcomes]
    return float(np.mean(seen)), float(np.mean(ttft)), float(np.mean(tpot))


def thresholds(seeds: int, jobs: int) -> None:
    cases = list(product((P, D), LOADS, range(seeds)))
    with ProcessPoolExecutor(jobs) as pool:
        found = dict(zip(cases, pool.map(loaded, cases), strict=True))
    print("| role | load | TTFT met | TPOT met |\n|---|---|---|---|")
    for role, load in product((P, D), LOADS):
        mean = np.mean([found[role, load, seed] for seed in range(seeds)], axis=0)
        print(f"| {role} | {mean[0]:.2f} | {100 * mean[1]:.1f} % | {100 * mean[2]:.1f} % |", flush=True)


# ---- forecasts -----------------------------------------------------------------------------------------------------

HORIZON = 120.0  # seconds: a window, a start, and what has queued meanwhile
LENGTH = 1500.0


def trended(
    observations: Sequence[Observation], fleet: ScaledFleet, limits: AutoscalerLimits, now: float
) -> ScalingDecision:
    """The same rule over what arrivals would be HORIZON seconds from now, by a line through the last observations."""
    recent = [each for each in observations if each.at > now - 2 * limits.scale_up_window]
    if len(recent) < 4:
        return decide(observations, fleet, limits, now)
    rates = [each.offered.arrived / each.seconds for each in recent]
    slope, level = np.polyfit([each.at - now for each in recent], rates, 1)
    factor = max(0.5, min(2.0, (level + slope * HORIZON) / max(level, 1e-9))) if level > 0 else 1.0
    return decide([*observations[: -len(recent)], *(scaled(each, factor) for each in recent)], fleet, limits, now)


def scaled(each: Observation, factor: float) -> Observation:
    arriving = ("arrived", "prompt_tokens", "prompt_pairs")
    work = {
        name: OfferedWork(**{key: getattr(of, key) * (factor if key in arriving else 1) for key in TOTALS})
        for name, of in each.work.items()
    }
    return replace(each, work=work)


def diurnal() -> Iterator[TrafficPhase]:
    """Two days of less than a quarter of an hour each, in steps of a minute."""
    for step in range(int(LENGTH / 60)):
        rate = 0.6 + 0.45 * sin(2 * pi * step * 60 / (LENGTH / 2))
        yield TrafficPhase(traffic=kind(200, 16, 8000.0, 400.0), rate=rate, seconds=60.0)


def bursty() -> Iterator[TrafficPhase]:
    """Three minutes in ten have three times the load."""
    for step in range(int(LENGTH / 60)):
        rate = 1.2 if step % 10 in (4, 5, 6) else 0.4
        yield TrafficPhase(traffic=kind(200, 16, 8000.0, 400.0), rate=rate, seconds=60.0)


TRACES: dict[str, Callable[[], Iterator[TrafficPhase]]] = {"diurnal": diurnal, "bursty": bursty}
PLAIN = AutoscalerLimits(scale_down_window=120.0, cool_down=60.0)
RULES = {
    "reactive": (decide, PLAIN),
    "reactive, earlier": (decide, replace(PLAIN, scale_up=0.6)),  # spare workers in place of a forecast
    "forecast": (trended, PLAIN),
}


def followed(case: tuple[str, str, int]) -> tuple[float, float, int]:
    """Attainment, workers in the mean, and actions."""
    trace, rule, seed = case
    plan = ClusterPlan.of(SLOW, (P, D), "goodput", heartbeat_interval=2.0)
    by, limits = RULES[rule]
    run = autoscaled(plan, phased(list(TRACES[trace]()), plan, seed), limits, seed=seed, decide=by)
    spans = [(after - at) * len(fleet) for (at, fleet), (after, _) in pairwise(run.fleets)]
    return share(run.run.outcomes, 0, LENGTH), sum(spans) / run.fleets[-1][0], len(run.actions)


def forecast(seeds: int, jobs: int) -> None:
    cases = list(product(TRACES, RULES, range(seeds)))
    with ProcessPoolExecutor(jobs) as pool:
        found = dict(zip(cases, pool.map(followed, cases), strict=True))
    print("| traffic | rule | attainment | workers | actions |\n|---|---|---|---|---|")
    for trace, rule in product(TRACES, RULES):
        each = [found[trace, rule, seed] for seed in range(seeds)]
        attained = ", ".join(f"{100 * one:.1f}" for one, _, _ in each)
        mean = np.mean(each, axis=0)
        print(f"| {trace} | {rule} | {100 * mean[0]:.1f} % ({attained}) | {mean[1]:.2f} | {mean[2]:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("flip", "thresholds", "forecast"))
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/img/autoscaler-flip.svg"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # preempted sequences are placed again
    if given.what == "flip":
        flip(given.path)
    else:
        {"thresholds": thresholds, "forecast": forecast}[given.what](given.seeds, given.jobs)


if __name__ == "__main__":
    main()
