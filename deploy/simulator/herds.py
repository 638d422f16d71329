"""How evenly several routers load the same workers: herds, by policy, age of what routers know, and rule for ties.

    python -m deploy.simulator.herds --routers 1,2,4 --heartbeat-interval 0.05,0.25,1

It measures; what is to be believed of it is for its reader to say.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from unittest.mock import patch

from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.outcomes import OutcomeColumns, figures
from deploy.simulator.profiles import PROFILES
from deploy.simulator.run import simulate
from deploy.simulator.traffic import TRAFFIC, trace
from router.candidate import Candidate
from router.policies import POLICIES
from router.policy import Demand, spread
from serving.messages import Role

SAMPLE_SECONDS = 0.1
WARM_SECONDS = 5.0  # before the first look: workers fill up

TIES: dict[str, Callable[[Demand, Candidate], int]] = {
    "hash": spread,
    "name": lambda demand, worker: worker.tag,
}


@dataclass(slots=True)
class Herd:
    """The leases of each worker, looked at every SAMPLE_SECONDS."""

    samples: list[list[int]] = field(default_factory=list)

    async def watch(self, cluster: SimulatedCluster) -> None:
        await asyncio.sleep(WARM_SECONDS)
        while True:
            self.samples.append(
                [len(worker.decode.table.leases) for worker in cluster.workers.values() if worker.decode]
            )
            await asyncio.sleep(SAMPLE_SECONDS)

    @property
    def imbalance(self) -> float:
        """The most leases of a worker by the mean of all, on average over time: 1 where all are loaded alike."""
        loaded = [max(sample) * len(sample) / sum(sample) for sample in self.samples if sum(sample)]
        return sum(loaded) / max(1, len(loaded))


@contextmanager
def ties_by(rule: str) -> Iterator[None]:
    """Placements that are as good as each other are told apart by this rule."""
    with ExitStack() as stack:
        for module in ("policy", "goodput"):
            stack.enter_context(patch(f"router.{module}.spread", TIES[rule]))
        yield


def measure(plan: ClusterPlan, rate: float, requests: int, seeds: Sequence[int]) -> tuple[float, float, float]:
    """Imbalance, attainment, and TTFT p90 in milliseconds: means over the seeds."""
    found = []
    for seed in seeds:
        herd, arrivals = Herd(), trace(TRAFFIC["chat"], plan.profile, requests, seed)
        outcomes = simulate(plan, arrivals, rate, seed=seed, watch=herd.watch).outcomes
        of = figures(rate, [OutcomeColumns(outcomes)])
        found.append((herd.imbalance, of.attainment, of.ttft_p90))
    imbalance, attainment, ttft = (sum(column) / len(found) for column in zip(*found, strict=True))
    return imbalance, attainment, ttft


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.simulator.herds", description=__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=8, help="mixed workers (default: 8)")
    add("--routers", default="1,2", metavar="N,…", help="routers over them (default: 1,2)")
    add("--heartbeat-interval", default="0.05,0.25,1", metavar="S,…", help="seconds (default: 0.05,0.25,1)")
    add("--policy", default="least_loaded,goodput", metavar="NAME,…", help=", ".join(POLICIES))
    add("--ties", default="hash,name", metavar="RULE,…", help=", ".join(TIES))
    add("--rate", type=float, default=30.0, help="chats a second, of all routers (default: 30)")
    add("--requests", type=int, default=1200, metavar="N", help="for each seed (default: 1200)")
    add("--seeds", type=int, default=2, metavar="N", help="(default: 2)")
    given = parser.parse_args(arguments)
    base = ClusterPlan.of(PROFILES["a100-opt13b"], (Role.MIXED,) * given.workers, "least_loaded")
    print("policy        ties  routers  heartbeat s  max/mean leases  attained  TTFT p90 ms")
    intervals = [float(text) for text in given.heartbeat_interval.split(",")]
    cases = product(given.policy.split(","), given.ties.split(","), map(int, given.routers.split(",")), intervals)
    for policy, rule, routers, interval in cases:
        router = replace(base.router, policy=policy)
        plan = replace(base, router=router, routers=routers, heartbeat_interval=interval)
        with ties_by(rule):
            imbalance, attainment, ttft = measure(plan, given.rate, given.requests, range(given.seeds))
        print(
            f"{policy:13} {rule:5} {routers:7} {interval:12g} {imbalance:16.2f} {attainment:9.1%} {ttft:12.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
