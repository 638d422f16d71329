"""How long the simulator takes and what memory it holds: seconds for 10,000 requests, bytes for each further one.

    python -m deploy.simulator.speed
    python -m deploy.simulator.speed --workers mixed=1000 --rate 10000 --requests 20000 --further 20000 --target 1000000

It times `Study.at`, as `millrace simulate` calls it, in processes of its own, so that their memory is theirs alone.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.command import MOST_NOISE, roles_of
from deploy.simulator.profiles import PROFILES
from deploy.simulator.study import Study
from deploy.simulator.traffic import traffic_of
from router.policies import POLICIES

UNIT = 10_000  # requests that seconds are told for


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedFigures:
    """Of so many requests in all: seconds on the clock, seconds of CPU time of all processes, and bytes.

    `peak` is the most that one process held, `idle` what it held before the first request.
    """

    requests: int
    seconds: float
    cpu: float
    peak: int
    idle: int
    attainment: float
    simulated: float  # virtual seconds

    def told(self) -> str:
        seconds, cpu = (taken * UNIT / self.requests for taken in (self.seconds, self.cpu))
        own = (self.peak - self.idle) / 1e6
        return (
            f"{self.requests:>9,} requests, {self.simulated:,.0f} s simulated, {self.attainment:.1%} attained:"
            f" {self.seconds:.1f} s, {self.cpu:.1f} s of CPU; for {UNIT:,} {seconds:.1f} s, {cpu:.1f} s of CPU;"
            f" at most {self.peak / 1e6:,.0f} MB of resident memory, {own:,.0f} MB of them the run's"
        )


def _used() -> tuple[float, int]:
    """Seconds of CPU time of this process and those below it that have ended, and the most bytes one has held."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used), max(each.ru_maxrss for each in used) * 1024


def _resident() -> int:
    """Bytes that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _teller(every: int) -> Callable[[int], None]:
    """Tells what the process holds whenever so many further requests have ended; with 0 nothing."""
    over, (before, _) = 0, _used()

    def ended(count: int) -> None:
        nonlocal over
        told, over = over // every if every else 0, over + count
        if every and over // every > told:
            seconds = _used()[0] - before
            print(f"{over:>9,} ended: {_resident() / 1e6:,.0f} MB, {seconds:,.0f} s of CPU", flush=True)

    return ended


def _measure(study: Study, rate: float, every: int, answer: Connection) -> None:
    """In a process of its own. Where runs are in processes below it, the memory is that of the largest."""
    logging.getLogger().setLevel(logging.CRITICAL)
    (before, idle), began = _used(), time.perf_counter()
    found = study.at(rate, _teller(every))
    cpu, peak = _used()
    answer.send(
        SpeedFigures(
            requests=found.offered,
            seconds=time.perf_counter() - began,
            cpu=cpu - before,
            peak=peak,
            idle=idle,
            attainment=found.attainment,
            simulated=found.seconds,
        )
    )


def measure(study: Study, rate: float, every: int = 0) -> SpeedFigures:
    """In a new process, which tells its memory after `every` so many requests. Raises EOFError where that dies."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(study, rate, every, theirs))
    process.start()
    theirs.close()
    try:
        found: SpeedFigures = ours.recv()
    finally:
        process.join()
    return found


def check(options: argparse.Namespace) -> None:
    """Raises ValueError that names the flag."""
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: give at least 1")
    if options.requests < 2 * options.jobs:
        raise ValueError(f"--requests {options.requests}: give at least 2 for each of the --jobs")
    if options.further and options.further < options.jobs:
        raise ValueError(f"--further {options.further}: give 0, or at least one for each of the --jobs")
    if options.every < 0 or (options.every and options.jobs > 1):
        raise ValueError(f"--every {options.every}: give 0, or a number of requests and --jobs 1")
    if options.num_kv_blocks is not None and options.num_kv_blocks < 1:
        raise ValueError(f"--num-kv-blocks {options.num_kv_blocks}: give at least 1")
    if not 0 < options.rate < math.inf:
        raise ValueError(f"--rate {options.rate:g}: give a number above 0")
    if not 0 <= options.noise <= MOST_NOISE:
        raise ValueError(f"--noise {options.noise:g}: give 0 to {MOST_NOISE:g}")


def study_of(options: argparse.Namespace) -> Study:
    """As many requests for each of as many seeds as processes. Raises ValueError."""
    plan = ClusterPlan.of(PROFILES[options.profile], roles_of(options.workers), options.policy, noise=options.noise)
    plan = replace(plan, engine=replace(plan.engine, num_kv_blocks=options.num_kv_blocks))
    return Study(
        plan=plan,
        traffic=traffic_of(options.workload),
        requests=options.requests // options.jobs,
        seeds=tuple(range(options.jobs)),
        jobs=options.jobs,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.simulator.speed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--workers", default="mixed=4", metavar="ROLE=N,…", help="(default: mixed=4)")
    add("--policy", default="least_loaded", choices=POLICIES, help="(default: least_loaded)")
    add("--profile", default="a100-opt13b", choices=PROFILES, help="(default: a100-opt13b)")
    add("--workload", default="chat", help="(default: chat)")
    add("--rate", type=float, default=40.0, help="requests a second (default: 40)")
    add("--requests", type=int, default=UNIT, metavar="N", help=f"(default: {UNIT})")
    add("--further", type=int, default=9 * UNIT, metavar="N", help=f"in a second run, besides (default: {9 * UNIT})")
    add("--target", type=int, default=0, metavar="N", help="tell what so many would take; default: nothing")
    add("--jobs", type=int, default=2, metavar="N", help="processes, of a seed each (default: 2)")
    add(
        "--every",
        type=int,
        default=0,
        metavar="N",
        help="tell the memory each time so many have ended (default: 0, never)",
    )
    add("--num-kv-blocks", type=int, metavar="N", help="KV blocks of a worker; default: the profile's")
    add("--noise", type=float, default=0.0, help="of a step's time (default: 0)")
    options = parser.parse_args(arguments)
    try:
        check(options)
        study = study_of(options)
    except ValueError as error:
        parser.error(str(error))
    few = measure(study, options.rate, options.every)
    print(few.told(), flush=True)
    if not options.further:
        return 0
    many = measure(
        replace(study, requests=study.requests + options.further // options.jobs), options.rate, options.every
    )
    more = many.requests - few.requests
    slope, pace = (many.peak - few.peak) / more * options.jobs, (many.seconds - few.seconds) / more
    print(many.told())
    print(f"   each further request: {slope:,.0f} bytes of its process, {pace * 1e3:.2f} ms")
    if options.target:
        left = options.target - many.requests
        print(
            f"   {options.target:,} requests would take {(many.seconds + left * pace) / 60:,.0f} minutes and"
            f" {(many.peak + left * slope / options.jobs) / 1e9:.2f} GB a process"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
