"""The spans of `bench.overload` on two simulated workers: python -m scripts.overload_study [--seeds 30]

Its seeds have the same requests at the same times as there, where three take six minutes; here thirty take one. What
steps take is that of a CPU on which the prompts of interactive requests use up half of their TTFT objective.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from multiprocessing import Pool
from statistics import median

from bench.mixture import TimedAsk
from bench.overload import BATCH, INTERACTIVE, KINDS, arguments, spans_of
from bench.report import aligned
from bench.surge import LoadSpan, bounds, timed_in_spans
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import PROFILES, Fitted
from deploy.simulator.run import quiet_log, simulate
from deploy.simulator.trace_files import TracedRequest, made_up, natural_rate
from serving.messages import Role, Slo
from serving.step_cost import StepCost

COST = StepCost(fixed=8e-3, token=1.72e-3, pair=2e-7, sequence=2e-5, context=5e-6)  # one core of a Zen 3, INT8
NOISE = 0.12
CAPACITY = 1.67  # requests/s of both kinds in a closed loop of two such workers


@dataclass(slots=True)
class SpanOutcomes:
    """Of one span, by kind."""

    outcomes: dict[str, list[RequestOutcome]] = field(default_factory=lambda: {kind.name: [] for kind in KINDS})

    def row(self, name: str) -> list[str]:
        quick, slow = self.outcomes[INTERACTIVE.name], self.outcomes[BATCH.name]
        ttft = sorted(1e3 * one.ttft for one in quick if one.ttft is not None)
        tpot = [1e3 * one.tpot for one in quick if one.tpot is not None]
        waits = [one.ttft for one in slow if one.ttft is not None]
        paces = [1e3 * one.tpot for one in slow if one.tpot is not None]
        met, refused = sum(one.met for one in quick), sum(one.error is not None for one in quick)
        cells = [f"{met / len(quick):.1%}", str(refused), f"{median(ttft):.0f}", f"{ttft[int(0.99 * len(ttft))]:.0f}"]
        cells += [f"{median(tpot):.1f}", f"{median(waits):.1f}" if waits else "—"]
        return [name, str(len(quick)), *cells, f"{median(paces):.1f}" if paces else "—"]


def spans(capacity: float) -> list[LoadSpan]:
    return spans_of(arguments().parse_args([]), capacity)


def traced(one: TimedAsk) -> TracedRequest:
    kind, objectives = one.kind, one.kind.slo
    return TracedRequest(
        arrival_s=one.at,
        prompt_tokens=one.ask.prompt_tokens,
        output_tokens=one.ask.output_tokens,
        ttft_slo_ms=nan if objectives.ttft_ms is None else objectives.ttft_ms,
        tpot_slo_ms=nan if objectives.tpot_ms is None else objectives.tpot_ms,
        service_class=kind.service_class or kind.name,
    )


def play(
    cost: StepCost, noise: float, capacity: float, seed: int
) -> tuple[list[tuple[float, str, RequestOutcome]], float]:
    """When each request came, of which kind, and what became of it; and the seconds until the last had ended."""
    profile = replace(PROFILES["cpu-smollm2-int8"], name="overload", steps=Fitted(cost))
    plan = ClusterPlan.of(profile, (Role.MIXED, Role.MIXED), "goodput", noise=noise)
    timed = timed_in_spans(KINDS, spans(capacity), seed=seed)
    trace = [traced(one) for one in timed]
    with quiet_log():
        run = simulate(plan, made_up(trace, Slo(), seed), natural_rate(trace), seed=seed)
    return [(one.at, one.kind.name, outcome) for one, outcome in zip(timed, run.outcomes, strict=True)], run.seconds


def show(runs: Sequence[tuple[list[tuple[float, str, RequestOutcome]], float]], capacity: float) -> None:
    heads = ["span", "interactive", "attained", "refused", "TTFT p50, ms", "p99", "TPOT p50, ms"]
    rows = [[*heads, "batch TTFT p50, s", "batch TPOT p50, ms"]]
    for span, first, last in bounds(spans(capacity)):
        found = SpanOutcomes()
        for arrived, _ in runs:
            for at, kind, outcome in arrived:
                if first <= at < last:
                    found.outcomes[kind].append(outcome)
        rows.append(found.row(span.name))
    print(aligned(rows, texts=1))
    print(f"all had ended after {median(seconds for _, seconds in runs):.1f} s (median)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.overload_study", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="runs, taken together (30)")
    parser.add_argument("--capacity", type=float, default=CAPACITY, help=f"requests/s ({CAPACITY})")
    for name in ("fixed", "token", "sequence"):
        default = 1e3 * getattr(COST, name)
        parser.add_argument(f"--{name}", type=float, default=default, metavar="MS", help=f"of a step ({default:g})")
    parser.add_argument("--noise", type=float, default=NOISE, help=f"of a step's time, as a logarithm ({NOISE})")
    asked = parser.parse_args()
    cost = replace(COST, fixed=asked.fixed / 1e3, token=asked.token / 1e3, sequence=asked.sequence / 1e3)
    with Pool() as pool:
        runs = pool.starmap(play, [(cost, asked.noise, asked.capacity, seed) for seed in range(asked.seeds)])
    show(runs, asked.capacity)


if __name__ == "__main__":
    main()
