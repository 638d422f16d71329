"""`millrace simulate`: reads what to simulate, shows how far it is, prints what came of it.

It decides nothing about clusters or load.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from bench.goodput import SearchLimits
from deploy.simulator import report
from deploy.simulator.ablation import without
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.drafts import DraftModel
from deploy.simulator.network import NetworkModel
from deploy.simulator.outcomes import RateFigures
from deploy.simulator.profile_files import read_profile
from deploy.simulator.profiles import PROFILES, Fitted, Profile, profile_of
from deploy.simulator.recorded_systems import SYSTEMS
from deploy.simulator.run import quiet_log
from deploy.simulator.step_records import VariedStep, beside_each_other, read_steps
from deploy.simulator.study import Study
from deploy.simulator.trace_files import MOST_TOKENS, TraceFile
from deploy.simulator.traffic import Lengths, Traffic, traffic_of
from router.policies import POLICIES
from serving.messages import Role

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
FROM_ZERO = ("message_ms", "commit_ms", "front_ms")
LEAST_RATE = 1e-6  # requests a second
MOST_NOISE = 3.0
SEARCH = "search"  # in the place of rates
SEEDS, SEEDS_OF_A_TRACE = 3, 1
WIDTH = 24  # characters of the progress bar
EVERY_SECONDS = 0.1
INTERRUPTED = 130  # exit code, as of a process that Ctrl-C has ended


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
        if role not in list(Role):
            raise ValueError(f"--role-profiles {text}: {part!r} is not ROLE=NAME with one of {', '.join(Role)}")
        found[Role(role)] = named_profile("--role-profiles", name)
    return found


def noise_of(text: str) -> dict[Role, float]:
    """`prefill=0.1` → that role's noise. Raises ValueError."""
    found: dict[Role, float] = {}
    for part in filter(None, text.split(",")):
        role, _, number = part.strip().partition("=")
        try:
            noise = float(number)
        except ValueError:
            noise = math.nan
        if role not in list(Role) or not 0 <= noise <= MOST_NOISE:
            raise ValueError(f"--role-noise {text}: {part!r} is not ROLE=X with a role and 0 to {MOST_NOISE:g}")
        found[Role(role)] = noise
    return found


def steps_of(text: str, hardware: Callable[[Role], Profile]) -> dict[Role, tuple[VariedStep, ...]]:
    """`prefill=steps.prefill-0.json` → how that role's steps varied, held against its profile. Raises ValueError."""
    found: dict[Role, tuple[VariedStep, ...]] = {}
    for part in filter(None, text.split(",")):
        role, _, name = part.strip().partition("=")
        if role not in list(Role) or not name:
            raise ValueError(f"--role-steps {text}: {part!r} is not ROLE=FILE with one of {', '.join(Role)}")
        steps = hardware(Role(role)).steps
        if not isinstance(steps, Fitted):
            raise ValueError(f"--role-steps {text}: give the role a profile that millrace profile wrote")
        found[Role(role)] = read_steps(Path(name), steps.cost)
    return beside_each_other(found)


def named_profile(flag: str, name: str) -> Profile:
    """One that is known, or that a file describes. Raises ValueError that names the flag or the file; OSError."""
    if name in PROFILES:
        return profile_of(name)
    if not name.endswith((".toml", ".json")):
        raise ValueError(f"{flag} {name}: there are {', '.join(PROFILES)}; or give a .toml or .json file")
    return read_profile(Path(name))


def lengths_of(flag: str, text: str) -> Lengths:
    """`256:0.5` → a mean and a spread. Raises ValueError."""
    mean, _, spread = text.partition(":")
    try:
        found = Lengths(float(mean), float(spread or 0.0), most=MOST_TOKENS)
    except ValueError:
        found = Lengths(math.nan)
    if not (1 <= found.mean < math.inf and 0 <= found.spread <= MOST_NOISE):
        raise ValueError(f"{flag} {text}: give a mean of at least 1 token, or MEAN:SPREAD with 0 to {MOST_NOISE:g}")
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
    for name in FROM_ZERO:
        if not 0 <= getattr(options, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name):g}: give a number from 0 on")
    if options.requests < 2:
        raise ValueError(f"--requests {options.requests}: give at least 2")
    if not 0 <= options.noise <= MOST_NOISE:
        raise ValueError(f"--noise {options.noise:g}: give 0 to {MOST_NOISE:g}")
    if not 0 < options.attainment <= 1:
        raise ValueError(f"--attainment {options.attainment:g}: give a share above 0 and at most 1")
    if options.rate not in (None, SEARCH):
        rates_of(options.rate)
    if options.json is not None and (options.json.is_dir() or not os.access(options.json.absolute().parent, os.W_OK)):
        raise ValueError(f"--json {options.json}: cannot be written; give a file in a folder that can")
    if options.jobs < 0:
        raise ValueError(f"--jobs {options.jobs}: give at least 1")
    if options.system is not None and options.without:
        raise ValueError(f"--without {options.without}: nothing of ours decides in {options.system}")


def traffic_from(options: argparse.Namespace) -> Traffic:
    """The workload with the lengths and objectives that are given. Raises ValueError."""
    traffic = replace(traffic_of(options.workload), burstiness=options.burstiness)
    for name in ("prompt", "output"):
        text = getattr(options, f"{name}_tokens")
        if text is not None:
            found: dict[str, Any] = {name: lengths_of(f"--{name}-tokens", text)}
            traffic = replace(traffic, classes=tuple(replace(kind, **found) for kind in traffic.classes))
    return traffic.with_objectives(options.ttft_ms, options.tpot_ms)


def study_of(options: argparse.Namespace, policy: str) -> Study:
    """Raises ValueError for settings that cannot be, and for files; OSError."""
    if policy not in POLICIES:
        raise ValueError(f"--policy {policy}: there are {', '.join(POLICIES)}")
    check(options)
    system = SYSTEMS[options.system] if options.system is not None else None
    profile = system.model if system is not None else named_profile("--profile", options.profile)
    of_role = profiles_of(options.role_profiles)
    if any(other.model != profile.model for other in of_role.values()):
        raise ValueError(f"--role-profiles {options.role_profiles}: all workers must be of one model, {profile.model}")
    plan = ClusterPlan.of(
        profile,
        roles_of(options.workers),
        policy,
        network=NetworkModel(
            message_seconds=options.message_ms / 1e3,
            commit_seconds=options.commit_ms / 1e3,
            bytes_per_second=options.bandwidth * 1e9,
        ),
        front_seconds=options.front_ms / 1e3,
        learned=options.learned,
        noise=options.noise,
        noise_of=noise_of(options.role_noise),
        steps_of=steps_of(options.role_steps, lambda role: of_role.get(role, profile)),
        heartbeat_interval=options.heartbeat_interval,
        of_role=of_role,
    )
    if options.drafts is not None:
        plan = plan.with_drafts(DraftModel(right=options.drafts))
    given = {name: getattr(options, name) for name in ENGINE_FLAGS if getattr(options, name) is not None}
    traced = TraceFile.checked(options.trace) if options.trace is not None else None
    seeds = options.seeds or (SEEDS_OF_A_TRACE if traced else SEEDS)
    traffic = traffic_from(options)
    for name in ("prompt", "output"):
        means = [getattr(kind, name).mean for kind in traffic.classes if getattr(kind, name) is not None]
        if getattr(options, f"{name}_tokens") is not None and max(means) >= profile.max_model_len:
            raise ValueError(f"--{name}-tokens {max(means):g}: {profile.name} takes less than {profile.max_model_len}")
    return Study(
        plan=replace(plan, engine=replace(plan.engine, **given)),
        traffic=traffic,
        requests=options.requests,
        seeds=tuple(range(seeds)),
        max_tokens=options.max_tokens,
        given=traced,
        system=system,
        jobs=options.jobs or os.cpu_count() or 1,
    )


def studies_of(options: argparse.Namespace) -> dict[str, Study]:
    """Of every policy, as it is and with each thing of --without switched off. Raises ValueError."""
    if options.system is not None:
        return {options.system: study_of(options, options.policy.split(",")[0])}  # its policy is its own
    found: dict[str, Study] = {}
    for policy in options.policy.split(","):
        found[policy] = whole = study_of(options, policy)
        for name in filter(None, options.without.split(",")):
            found[f"{policy} without {name}"] = replace(whole, plan=without(whole.plan, name))
    return found


class SimulationProgress:
    """Draws `least_loaded 12.5 req/s ████░░ 120/3000 · 400 a second` over itself, on a terminal alone."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._on = stream.isatty()
        self.began = time.perf_counter()
        self._drawn = 0.0

    def start(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._started = label, total, 0, time.perf_counter()

    def ended(self, count: int) -> None:
        """So many more requests have ended."""
        self._done += count
        now = time.perf_counter()
        if self._on and now - self._drawn > EVERY_SECONDS:
            self._drawn = now
            filled = self._done * WIDTH // self._total
            bar = "█" * filled + "░" * (WIDTH - filled)
            pace = self._done / max(now - self._started, 1e-9)
            self._stream.write(f"\r{self._label} {bar} {self._done}/{self._total} · {pace:.0f} a second\x1b[K")
            self._stream.flush()

    def clear(self) -> None:
        if self._on:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class BreakOff:
    """Ctrl-C: the first asks a run to end with what it has, the second ends the process. A context manager.

    Enter it in the main thread, as signals come there.
    """

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> BreakOff:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def run(options: argparse.Namespace) -> int:
    """Simulate and print; the process's exit code. Raises ValueError."""
    with quiet_log(), BreakOff() as broken_off:
        return _run(options, broken_off)


def _run(options: argparse.Namespace, broken_off: BreakOff) -> int:
    results: list[report.PolicyResult] = []
    studies = studies_of(options)
    first = next(iter(studies.values()))
    print(_heading(options, first))
    progress = SimulationProgress(sys.stderr)
    for policy, study in studies.items():
        result = _measured(options, policy, study, progress, broken_off)
        results.append(result)
        print(f"\n{policy}\n{report.rates_table(result)}", flush=True)
        if broken_off.asked:
            break
        if result.searched:
            print("   " + report.goodput_line(result, len(study.plan.roles), options.attainment), flush=True)
    if len(results) > 1 and results[0].searched and not broken_off.asked:
        print(f"\n{report.comparison(results)}")
    took, rates = time.perf_counter() - progress.began, [rate for each in results for rate in each.rates.values()]
    requests, seconds = sum(rate.offered for rate in rates), sum(rate.seconds for rate in rates)
    print(f"\n   {requests:,} requests, {seconds:,.0f} s simulated in {took:,.1f} s: {seconds / took:.0f}× real time")
    if options.json is not None:
        options.json.write_bytes(report.as_json(told(options), results))
    return INTERRUPTED if broken_off.asked else 0


def _heading(options: argparse.Namespace, study: Study) -> str:
    profile, runs = study.plan.profile, len(study.seeds)
    parts = [options.trace.name if options.trace is not None else options.workload]
    parts += [options.system] if options.system is not None else [options.workers, profile.name]
    parts.append(f"{runs} × {study.offered // runs} requests")
    parts.append(f"steps vary {variation(options.noise, study.plan)}")
    slos = {kind.name: kind.objectives(profile) for kind in study.traffic.classes}
    return report.heading(parts, {name: (slo.ttft_ms, slo.tpot_ms) for name, slo in slos.items()})


def variation(noise: float, plan: ClusterPlan) -> str:
    """As roles do whose steps were recorded, or that have a noise of their own; and as the others."""
    roles = dict.fromkeys(plan.roles)
    recorded = [role for role in roles if role in plan.steps_of]
    others = {role: plan.noise_of.get(role, noise) for role in roles if role not in plan.steps_of}
    parts = [f"as recorded ({', '.join(recorded)})"] if recorded else []
    for found in dict.fromkeys(others.values()):
        named = ", ".join(role for role, own in others.items() if own == found)
        parts.append(f"by {found:.0%}" + (f" ({named})" if len(named.split(", ")) < len(roles) else ""))
    return ", ".join(parts)


def _measured(
    options: argparse.Namespace, policy: str, study: Study, progress: SimulationProgress, broken_off: BreakOff
) -> report.PolicyResult:
    """All rates that were asked for, or those of a search; fewer if it is broken off."""
    result = report.PolicyResult(policy=policy)
    searching = options.rate == SEARCH or (options.rate is None and study.given is None)
    wanted = options.attainment if searching else 0.0

    def measure(rate: float) -> RateFigures:
        progress.start(f"{policy} {rate:.2f} req/s", study.offered)
        result.rates[rate] = study.at(rate, progress.ended, wanted=wanted, stopped=lambda: broken_off.asked)
        progress.clear()
        return result.rates[rate]

    if not searching:
        for rate in rates_of(options.rate) if options.rate is not None else [study.natural_rate]:
            if not broken_off.asked:
                measure(rate)
        return result
    limits = SearchLimits(
        start=options.first_rate or study.first_rate(),
        attainment=options.attainment,
        tolerance=options.rate_tolerance,
        lowest=1e-3,
    )
    result.searched, result.goodput = True, study.goodput(limits, measure, lambda: broken_off.asked)
    return result


def told(options: argparse.Namespace) -> dict[str, object]:
    """The flags as JSON has them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
