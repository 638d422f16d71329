"""Digests of small runs of every kind: whoever makes the simulator or what it runs faster leaves each outcome as it is.

Where a change of behaviour is meant, run this file as a program and put what it prints into GOLDEN.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.drafts import DraftModel
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import PROFILES
from deploy.simulator.run import quiet_log, simulate
from deploy.simulator.traffic import TRAFFIC, Lengths, Traffic, TrafficClass, trace
from serving.errors import WorkerLost
from serving.messages import Role

PROFILE = PROFILES["a100-opt13b"]
MIXED, PREFILL, DECODE = Role.MIXED, Role.PREFILL, Role.DECODE
ENGINE = ClusterPlan.of(PROFILE, (), "least_loaded").engine
GROWS = Traffic(name="grows", classes=(TrafficClass(prompt=Lengths(30), output=Lengths(150)),))
LITTLE = {"traffic": GROWS, "rate": 100.0, "engine": dataclasses.replace(ENGINE, num_kv_blocks=40)}


async def lose_a_worker(cluster: SimulatedCluster) -> None:
    await asyncio.sleep(0.8)
    for fleet in cluster.fleets:
        fleet.suspect(next(iter(cluster.workers)), WorkerLost("it is gone"))


async def exchange_a_worker(cluster: SimulatedCluster) -> None:
    await asyncio.sleep(0.8)
    leaving = next(iter(cluster.workers.values()))
    cluster.join(MIXED, "late", "second")
    await cluster.leave(leaving, 0.3)


CASES: dict[str, Callable[[], list[RequestOutcome]]] = {
    "mixed": lambda: outcomes((MIXED,) * 2),
    "split": lambda: outcomes((PREFILL, DECODE, DECODE), "prefix_aware", traffic=TRAFFIC["long-mixed"], rate=6.0),
    "auto": lambda: outcomes((MIXED, PREFILL, DECODE), "goodput", traffic=TRAFFIC["long-mixed"], rate=60.0, count=60),
    "prefixes": lambda: outcomes((MIXED, PREFILL, DECODE), "goodput", traffic=TRAFFIC["shared-prefix"], rate=8.0),
    "preempted": lambda: outcomes((MIXED,), count=12, **LITTLE),
    "preempted, split": lambda: outcomes((PREFILL, DECODE), count=12, **LITTLE),
    "drafts": lambda: outcomes(
        (MIXED,) * 2,
        "goodput",
        drafts=DraftModel(right=0.6),
        engine=dataclasses.replace(ENGINE, num_speculative_tokens=4),
    ),
    "a lost worker": lambda: outcomes((MIXED,) * 3, "goodput", rate=25.0, watch=lose_a_worker),
    "workers that leave and join": lambda: outcomes((MIXED,) * 2, rate=25.0, watch=exchange_a_worker),
    "two routers": lambda: outcomes((MIXED,) * 4, rate=30.0, routers=2),
}
GOLDEN = {
    "mixed": "c0dc5b4f1c85f464",
    "split": "081ed3ef769ecd0f",
    "auto": "959b0b25d3ba1f87",
    "prefixes": "04398a68d4e3b24d",
    "preempted": "0e74105fbc4738d4",
    "preempted, split": "700dd01d88dad625",
    "drafts": "a11bc88d3fa62c0a",
    "a lost worker": "3e553dc19fe8f7f1",
    "workers that leave and join": "303b07933dda9acf",
    "two routers": "72950929c6b3b702",
}


def outcomes(
    roles: tuple[Role, ...],
    policy: str = "least_loaded",
    *,
    traffic: Traffic = TRAFFIC["chat"],
    count: int = 30,
    rate: float = 15.0,
    watch: Any = None,
    **fields: Any,
) -> list[RequestOutcome]:
    plan = ClusterPlan.of(PROFILE, roles, policy, **fields)
    with quiet_log():
        return simulate(plan, trace(traffic, PROFILE, count, 5), rate, seed=5, watch=watch).outcomes


def digest(done: list[RequestOutcome]) -> str:
    """Of every request: its times to the nanosecond, its text, where it went and how it ended."""
    made = hashlib.sha256()
    for each in done:
        times = (each.arrived, each.first_token, each.last_token, each.ended)
        nanoseconds = [None if at is None else round(at * 1e9) for at in times]
        told = (each.request.request_id, nanoseconds, each.tokens, each.finish, each.error, each.placed)
        made.update(repr(told).encode())
    return made.hexdigest()[:16]


@pytest.mark.parametrize("case", CASES)
def test_every_outcome_is_what_it_was(case: str) -> None:
    assert digest(CASES[case]()) == GOLDEN[case]


def test_the_cases_are_of_what_they_are_named_after() -> None:
    assert any(each.error for each in CASES["auto"]()), "nobody was refused"
    assert any(len(each.placed) > 2 for each in CASES["preempted"]()), "none was preempted"
    assert any(len(each.placed) > 2 for each in CASES["a lost worker"]()), "none was placed again"


if __name__ == "__main__":
    for name, outcomes_of in CASES.items():
        print(f'    "{name}": "{digest(outcomes_of())}",')
