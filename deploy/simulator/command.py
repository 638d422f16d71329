"""The command line of the simulator: reads what to simulate, shows how far it is, prints what came of it.

It decides nothing about clusters or load.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from bench.goodput import SearchLimits
from deploy.simulator import report
from deploy.simulator.ablation import ABLATIONS, without
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.drafts import DraftModel
from deploy.simulator.network import NetworkModel
from deploy.simulator.outcomes import RateFigures, RequestOutcome
from deploy.simulator.profiles import PROFILES, Profile, profile_of
from deploy.simulator.run import Study
from deploy.simulator.traffic import TRAFFIC, traffic_of
from router.policies import POLICIES
from serving.messages import Role

DESCRIPTION = """Serve made-up requests on a made-up cluster: the schedulers, leases, KV blocks and router are those
that serve; what computing and the wire take is modelled, and time is virtual. Without --rate it looks for the highest
rate at which enough requests meet their objectives.

  python -m deploy.simulator --workers mixed=4
  python -m deploy.simulator --workers prefill=2,decode=2 --workload long-mixed --policy least_loaded,prefix_aware
"""
ENGINE_FLAGS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_kv_blocks",
    "chunking",
    "prefill_order",
    "tpot_admission",
)
ABOVE_ZERO = (
    *("first_rate", "ttft_ms", "tpot_ms", "burstiness", "bandwidth", "heartbeat_interval", "rate_tolerance"),
    *("max_tokens", "max_num_batched_tokens", "max_num_seqs", "num_kv_blocks", "seeds"),
)
LEAST_RATE = 1e-6  # requests a second
MOST_NOISE = 3.0
WIDTH = 24  # characters of the progress bar
EVERY_SECONDS = 0.1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.simulator", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", default="mixed=4", metavar="ROLE=N,…", help="workers of each role (default: mixed=4)")
    add("--policy", default="least_loaded", metavar="NAME,…", help=f"routing policies: {', '.join(POLICIES)}")
    add("--workload", default="chat", choices=TRAFFIC, help="what is asked (default: chat)")
    add("--profile", default="a100-opt13b", choices=PROFILES, help="model and hardware (default: a100-opt13b)")
    add("--role-profiles", default="", metavar="ROLE=NAME,…", help="other profiles, of the workers of a role")
    add("--rate", metavar="R,…", help="requests a second, instead of a search for goodput")
    add("--requests", type=int, default=1000, metavar="N", help="requests at every rate and seed (default: 1000)")
    add("--seeds", type=int, default=3, metavar="N", help="seeds at every rate (default: 3)")
    add("--attainment", type=float, default=0.9, help="share that must meet both objectives (default: 0.9)")
    add("--rate-tolerance", type=float, default=0.05, help="how exactly goodput is found (default: 0.05)")
    add("--first-rate", type=float, metavar="R", help="where the search begins; default: a guess by the profile")
    add("--ttft-ms", type=float, help="objective of every class; default: multiples of the profile's own times")
    add("--tpot-ms", type=float, help="the same, of each token after the first")
    add("--burstiness", type=float, default=1.0, help="coefficient of variation of the gaps; 1: Poisson (default: 1)")
    add("--max-tokens", type=int, help="what clients allow, beyond what there will be; default: just that")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step; default: the profile's")
    add("--max-num-seqs", type=int, metavar="N", help="sequences of a worker; default: the profile's")
    add("--num-kv-blocks", type=int, metavar="N", help="KV blocks of a worker; default: the profile's")
    add("--chunking", choices=("slack", "fixed"), help="as the workers' flag; default: as there")
    add("--prefill-order", choices=("slack", "fcfs"), help="as the workers' flag; default: as there")
    add("--tpot-admission", action=argparse.BooleanOptionalAction, help="as the workers' flag; default: as there")
    add(
        "--drafts",
        type=float,
        metavar="SHARE",
        help="draft tokens, of which this share is right; default: none",
    )
    add("--without", default="", metavar="NAME,…", help=f"also with one switched off in turn: {', '.join(ABLATIONS)}")
    add("--bandwidth", type=float, default=25.0, metavar="GB/S", help="into and out of a worker (default: 25)")
    add("--noise", type=float, default=0.05, help="of a step's time, as a logarithm (default: 0.05)")
    add("--heartbeat-interval", type=float, default=0.5, help="seconds between a worker's heartbeats (default: 0.5)")
    add("--json", type=Path, metavar="FILE", help="write all figures there too")
    return parser


def roles_of(text: str) -> tuple[Role, ...]:
    """`prefill=2,decode=1` → three roles. Raises ValueError."""
    roles: list[Role] = []
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if name not in list(Role) or not (count.isascii() and count.isdecimal()):
            raise ValueError(f"--workers {text}: {part!r} is not ROLE=N with one of {', '.join(Role)}")
        roles += [Role(name)] * int(count)
    able = {Role.PREFILL} <= set(roles) and {Role.DECODE} <= set(roles)
    if not able and Role.MIXED not in roles:
        raise ValueError(f"--workers {text}: some worker must prefill, and some must decode")
    return tuple(roles)


def profiles_of(text: str) -> dict[Role, Profile]:
    """`prefill=a100-opt13b-tp2` → that role's profile. Raises ValueError."""
    found: dict[Role, Profile] = {}
    for part in filter(None, text.split(",")):
        role, _, name = part.strip().partition("=")
        if role not in list(Role) or name not in PROFILES:
            raise ValueError(f"--role-profiles {text}: {part!r} is not ROLE=NAME with one of {', '.join(PROFILES)}")
        found[Role(role)] = profile_of(name)
    return found


def rates_of(text: str) -> list[float]:
    """`1,2.5` → two rates. Raises ValueError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(LEAST_RATE <= rate < math.inf for rate in rates):
        raise ValueError(f"--rate {text}: give requests a second, at least {LEAST_RATE:g}, with commas between them")
    return rates


def check(options: argparse.Namespace) -> None:
    """Raises ValueError that names a flag whose number cannot be."""
    for name in ABOVE_ZERO:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    if options.requests < 2:
        raise ValueError(f"--requests {options.requests}: give at least 2")
    if not 0 <= options.noise <= MOST_NOISE:
        raise ValueError(f"--noise {options.noise:g}: give 0 to {MOST_NOISE:g}")
    if not 0 < options.attainment <= 1:
        raise ValueError(f"--attainment {options.attainment:g}: give a share above 0 and at most 1")
    if options.rate is not None:
        rates_of(options.rate)


def study_of(options: argparse.Namespace, policy: str) -> Study:
    """Raises ValueError for settings that cannot be."""
    if policy not in POLICIES:
        raise ValueError(f"--policy {policy}: there are {', '.join(POLICIES)}")
    check(options)
    profile = profile_of(options.profile)
    network, of_role = NetworkModel(bytes_per_second=options.bandwidth * 1e9), profiles_of(options.role_profiles)
    if any(other.model != profile.model for other in of_role.values()):
        raise ValueError(f"--role-profiles {options.role_profiles}: all workers must be of one model, {profile.model}")
    plan = ClusterPlan.of(
        profile,
        roles_of(options.workers),
        policy,
        network=network,
        noise=options.noise,
        heartbeat_interval=options.heartbeat_interval,
        of_role=of_role,
    )
    if options.drafts is not None:
        plan = plan.with_drafts(DraftModel(right=options.drafts))
    given = {name: getattr(options, name) for name in ENGINE_FLAGS if getattr(options, name) is not None}
    traffic = replace(traffic_of(options.workload), burstiness=options.burstiness)
    return Study(
        plan=replace(plan, engine=replace(plan.engine, **given)),
        traffic=traffic.with_objectives(options.ttft_ms, options.tpot_ms),
        requests=options.requests,
        seeds=tuple(range(options.seeds)),
        max_tokens=options.max_tokens,
    )


def studies_of(options: argparse.Namespace) -> dict[str, Study]:
    """Of every policy, as it is and with each thing of --without switched off. Raises ValueError."""
    found: dict[str, Study] = {}
    for policy in options.policy.split(","):
        found[policy] = whole = study_of(options, policy)
        for name in filter(None, options.without.split(",")):
            found[f"{policy} without {name}"] = replace(whole, plan=without(whole.plan, name))
    return found


class SimulationProgress:
    """Draws `least_loaded 12.5 req/s ████░░ 120/3000 · 31× real time` over itself, on a terminal alone."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._on = stream.isatty()
        self.began = time.perf_counter()
        self.simulated = 0.0  # seconds of virtual time, of runs that are over
        self._drawn = 0.0

    def start(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._last = label, total, 0, 0.0

    def ended(self, outcome: RequestOutcome) -> None:
        """One request has ended."""
        self._done += 1
        assert outcome.ended is not None
        self.simulated += max(0.0, outcome.ended - self._last)
        self._last = 0.0 if self._total and outcome.ended < self._last else outcome.ended
        now = time.perf_counter()
        if self._on and now - self._drawn > EVERY_SECONDS:
            self._drawn = now
            filled = self._done * WIDTH // self._total
            bar = "█" * filled + "░" * (WIDTH - filled)
            line = (
                f"{self._label} {bar} {self._done}/{self._total} · {self.simulated / (now - self.began):.0f}× real time"
            )
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        if self._on:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def _quiet() -> Iterator[None]:
    """Requests that are placed anew say so, and here there are thousands of them."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)


def run(options: argparse.Namespace) -> int:
    """Simulate and print; the process's exit code. Raises ValueError."""
    with _quiet():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    results: list[report.PolicyResult] = []
    studies = studies_of(options)
    first = next(iter(studies.values()))
    print(_heading(options, first))
    progress = SimulationProgress(sys.stderr)
    for policy, study in studies.items():
        result = _measured(options, policy, study, progress)
        results.append(result)
        print(f"\n{policy}\n{report.rates_table(result)}", flush=True)
        if result.searched:
            print("   " + report.goodput_line(result, len(study.plan.roles), options.attainment), flush=True)
    if len(results) > 1 and results[0].searched:
        print(f"\n{report.comparison(results)}")
    took = time.perf_counter() - progress.began
    print(f"\n   {progress.simulated:,.0f} s simulated in {took:,.1f} s: {progress.simulated / took:.0f}× real time")
    if options.json is not None:
        options.json.write_bytes(report.as_json({**vars(options), "json": str(options.json)}, results))
    return 0


def _heading(options: argparse.Namespace, study: Study) -> str:
    profile = study.plan.profile
    parts = [options.workload, options.workers, profile.name, f"{options.seeds} × {options.requests} requests"]
    parts.append(f"steps vary by {options.noise:.0%}")
    slos = {kind.name: kind.objectives(profile) for kind in study.traffic.classes}
    return report.heading(parts, {name: (slo.ttft_ms, slo.tpot_ms) for name, slo in slos.items()})


def _measured(
    options: argparse.Namespace, policy: str, study: Study, progress: SimulationProgress
) -> report.PolicyResult:
    """All rates that were asked for, or those of a search."""
    result = report.PolicyResult(policy=policy)
    wanted = options.attainment if options.rate is None else 0.0

    def measure(rate: float) -> RateFigures:
        progress.start(f"{policy} {rate:.2f} req/s", study.requests * len(study.seeds))
        result.rates[rate] = study.at(rate, progress.ended, wanted=wanted)
        progress.clear()
        return result.rates[rate]

    if options.rate is not None:
        for rate in rates_of(options.rate):
            measure(rate)
        return result
    limits = SearchLimits(
        start=options.first_rate or study.first_rate(),
        attainment=options.attainment,
        tolerance=options.rate_tolerance,
        lowest=1e-3,
    )
    result.searched, result.goodput = True, study.goodput(limits, measure)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    try:
        return run(make_parser().parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"simulator: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
