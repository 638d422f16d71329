"""Whole simulated clusters: the same seed gives the same run, the text is right, nothing leaks, queues are as known."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from bench.workload import poisson_arrivals
from deploy.runtime.heartbeats import NEWS_AFTER
from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.network import NetworkModel
from deploy.simulator.outcomes import RequestOutcome
from deploy.simulator.profiles import PROFILES, Profile, StepWork
from deploy.simulator.run import SimulatedRun, simulate
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import TRAFFIC, Arrival, Lengths, Traffic, TrafficClass, trace
from deploy.simulator.virtual_loop import VirtualLoop, run_virtually
from router.policies import POLICIES
from serving.messages import FinishReason, Role
from serving.step_cost import StepLoad
from tests.house.source import ROOT

PROFILE = PROFILES["a100-opt13b"]
PLACEMENTS = {
    "mixed": (Role.MIXED,) * 2,
    "split": (Role.PREFILL, Role.DECODE, Role.DECODE),
    "both": (Role.MIXED, Role.PREFILL, Role.DECODE),
}
SMALL = Traffic(
    name="small", classes=(TrafficClass(prompt=Lengths(200, 0.8, most=800), output=Lengths(20, 0.8, most=100)),)
)


def run(
    roles: tuple[Role, ...],
    *,
    traffic: Traffic = SMALL,
    requests: int = 40,
    rate: float = 10.0,
    seed: int = 1,
    profile: Profile = PROFILE,
    policy: str = "least_loaded",
    max_tokens: int | None = None,
    **fields: object,
) -> tuple[SimulatedRun, tuple[Arrival, ...]]:
    arrivals = trace(traffic, profile, requests, seed, max_tokens=max_tokens)
    return simulate(ClusterPlan.of(profile, roles, policy, **fields), arrivals, rate, seed=seed), arrivals


def written_out(arrivals: Sequence[Arrival]) -> list[list[int]]:
    texts = ScriptedTexts({each.request.request_id: each.output_tokens for each in arrivals})
    return [texts.written_out(each.request) for each in arrivals]


def assert_nothing_is_held(done: SimulatedRun) -> None:
    assert len(done.audits) > 1
    assert {audit.service: audit.counts for audit in done.audits if any(audit.counts.values())} == {}
    assert {audit.service: audit.leaked for audit in done.audits if any(audit.leaked.values())} == {}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("max_tokens", [None, 300])
def test_every_placement_gives_the_text_of_an_undisturbed_run(placement: str, max_tokens: int | None) -> None:
    done, arrivals = run(PLACEMENTS[placement], max_tokens=max_tokens)
    assert [outcome.tokens for outcome in done.outcomes] == written_out(arrivals)
    assert {outcome.finish for outcome in done.outcomes} == {FinishReason.STOP}
    assert_nothing_is_held(done)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_shared_prefixes(policy: str) -> None:
    done, arrivals = run(PLACEMENTS["both"], traffic=TRAFFIC["shared-prefix"], policy=policy)
    assert [outcome.tokens for outcome in done.outcomes] == written_out(arrivals)
    assert_nothing_is_held(done)


def test_prompts_of_prefill_workers_are_handed_over() -> None:
    done, _ = run(PLACEMENTS["split"])
    sides = {(worker, side) for outcome in done.outcomes for worker, side in outcome.placed}
    assert sides == {("prefill-0", "prefill"), ("decode-1", "decode"), ("decode-2", "decode")}


def test_without_room_sequences_give_way_and_go_on() -> None:
    """So little KV that running sequences are preempted: their texts are still right, and nothing leaks."""
    engine = dataclasses.replace(ClusterPlan.of(PROFILE, (), "least_loaded").engine, num_kv_blocks=60)
    traffic = Traffic(name="grows", classes=(TrafficClass(prompt=Lengths(30), output=Lengths(300)),))
    done, arrivals = run((Role.MIXED,), traffic=traffic, requests=12, rate=100.0, engine=engine)
    assert [outcome.tokens for outcome in done.outcomes] == written_out(arrivals)
    assert any(len(outcome.placed) > 2 for outcome in done.outcomes), "none was preempted"
    assert_nothing_is_held(done)


def told(done: SimulatedRun) -> list[tuple[object, ...]]:
    """Everything that may differ."""
    return [
        (each.request.request_id, each.arrived, each.first_token, each.last_token, each.ended, *each.placed)
        for each in done.outcomes
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_same_seed_gives_the_same_decisions_at_the_same_times(placement: str) -> None:
    first, second, other = (told(run(PLACEMENTS[placement], seed=seed)[0]) for seed in (3, 3, 4))
    assert first == second
    assert first != other


@pytest.mark.thorough
def test_another_process_gives_the_same_run() -> None:
    """Hashes of strings differ between processes: no order may follow from them."""
    program = (
        "from tests.deploy.simulator.test_run import *; done, _ = run(PLACEMENTS['both'], policy='prefix_aware', "
        "traffic=TRAFFIC['shared-prefix'], requests=25); print(told(done))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1", "PYTHONPATH": str(ROOT)},
    ).stdout
    done, _ = run(PLACEMENTS["both"], policy="prefix_aware", traffic=TRAFFIC["shared-prefix"], requests=25)
    assert other == f"{told(done)}\n"
    assert len(other) > 1000


def test_a_queue_of_equal_prompts_is_as_long_as_known() -> None:
    """M/D/1: with D = 75.2 ms a prompt and 3 requests a second, a first token takes D + ρD / 2(1 - ρ) = 86.2 ms.

    OPT-13B on an A100 by DistServe's tables, prompts of 512 tokens, one a step, nothing decoded.
    """
    work = StepWork()
    work.add_prompt(0, 512)
    took = PROFILE.seconds(work)
    assert took == pytest.approx(0.0752, abs=5e-5)
    traffic = Traffic(name="prompts", classes=(TrafficClass(prompt=Lengths(512), output=Lengths(1)),))
    network = NetworkModel(message_seconds=0.0)
    done, _ = run((Role.MIXED,), traffic=traffic, requests=300, rate=3.0, profile=PROFILE, noise=0.0, network=network)
    found = [seconds_to_first(outcome) for outcome in done.outcomes]
    assert found == pytest.approx(waited([outcome.arrived for outcome in done.outcomes], took), abs=1e-6)
    assert max(found) > 2 * took, "some waited for others"
    share, many = 3.0 * took, [at / 3.0 for at in poisson_arrivals(1.0, 100_000, 1)]
    expected = took + share * took / (2 * (1 - share))
    assert expected == pytest.approx(0.0862, abs=5e-5)
    assert sum(waited(many, took)) / len(many) == pytest.approx(expected, rel=0.01)


def waited(arrivals: Sequence[float], took: float) -> list[float]:
    """Of requests served one after the other (Lindley's recursion): seconds from arrival to end."""
    free, found = 0.0, []
    for at in arrivals:
        free = max(free, at) + took
        found.append(free - at)
    return found


def seconds_to_first(outcome: RequestOutcome) -> float:
    assert outcome.ttft is not None
    return outcome.ttft


def test_a_request_alone_takes_what_the_profile_says() -> None:
    """Prompt, handoff and decode steps of an idle cluster, without noise, summed by hand."""
    network = NetworkModel(message_seconds=0.01, transfer_seconds=0.02, bytes_per_second=1e9)
    traffic = Traffic(name="one", classes=(TrafficClass(prompt=Lengths(500), output=Lengths(11)),))
    done, _ = run((Role.PREFILL, Role.DECODE), traffic=traffic, requests=1, rate=1.0, noise=0.0, network=network)
    (outcome,) = done.outcomes
    prompt = PROFILE.prompt_seconds(500)
    # connecting, opening there and back, the order there, the first token back
    assert outcome.ttft == pytest.approx(5 * 0.01 + prompt, abs=1e-6)
    sent = (
        max(0.01, prompt / PROFILE.layers) + 500 * PROFILE.kv_bytes / 1e9 + 0.02
    )  # since the prompt began, and its handoff with it
    assert sent > prompt, "the wire is what the second token waits for"
    decoding = sum(PROFILE.decode_seconds(1, 501 + number) for number in range(10))
    assert outcome.last_token is not None and outcome.first_token is not None
    # the commit there, and the last token back beside the first
    waited = sent - prompt + 0.01
    assert outcome.last_token - outcome.first_token == pytest.approx(waited + decoding, abs=1e-6)


def test_the_front_is_before_the_first_token_and_the_commit_after_it() -> None:
    """Each by its own seconds, on an idle cluster without noise."""
    traffic = Traffic(name="one", classes=(TrafficClass(prompt=Lengths(500), output=Lengths(11)),))
    slow = NetworkModel(commit_seconds=0.25)
    (plain,), (later,) = (
        run(PLACEMENTS["split"], traffic=traffic, requests=1, noise=0.0, **fields)[0].outcomes
        for fields in ({}, {"front_seconds": 0.5, "network": slow})
    )
    assert seconds_to_first(later) == pytest.approx(seconds_to_first(plain) + 0.5)
    assert plain.tpot is not None and later.tpot == pytest.approx(plain.tpot + 0.25 / 10)


def test_steps_of_a_role_may_vary_more() -> None:
    """Prompts here by themselves, decode steps as ever."""
    traffic = Traffic(name="some", classes=(TrafficClass(prompt=Lengths(500), output=Lengths(3)),))
    same, other = (
        run(PLACEMENTS["split"], traffic=traffic, requests=4, rate=0.01, noise=0.0, noise_of=noise)[0].outcomes
        for noise in ({}, {Role.PREFILL: 0.3})
    )
    assert len({round(seconds_to_first(outcome), 9) for outcome in same}) < 4
    assert len({round(seconds_to_first(outcome), 9) for outcome in other}) == 4
    assert [outcome.tpot for outcome in other] == pytest.approx([outcome.tpot for outcome in same], rel=0.2)


def test_workers_that_have_served_know_their_steps() -> None:
    """Before the first step, and as the profile has them; others begin with a guess."""
    found: list[bool] = []

    async def watch(cluster: SimulatedCluster) -> None:
        for worker in cluster.workers.values():
            cost = worker.costs.meter.cost()
            found.append(cost.samples > 0 and abs(cost.seconds(StepLoad.of(0, 512)) / took - 1) < 0.2)

    took = PROFILE.prompt_seconds(512)
    for learned in (True, False):
        plan = ClusterPlan.of(PROFILE, (Role.MIXED,), "least_loaded", learned=learned)
        simulate(plan, trace(SMALL, PROFILE, 1, 0), 1.0, watch=watch)
    assert found == [True, False]


def test_roles_may_have_hardware_of_their_own() -> None:
    """Prompts on two devices, decoding on one: each worker takes its own profile's times and KV."""
    pair = PROFILES["a100-opt13b-tp2"]
    traffic = Traffic(name="one", classes=(TrafficClass(prompt=Lengths(500), output=Lengths(11)),))
    done, _ = run((Role.PREFILL, Role.DECODE), traffic=traffic, requests=1, noise=0.0, of_role={Role.PREFILL: pair})
    (outcome,) = done.outcomes
    assert outcome.ttft == pytest.approx(pair.prompt_seconds(500) + 5 * 2e-4, abs=1e-6)
    assert outcome.tpot is not None and outcome.tpot > PROFILE.decode_seconds(1, 500)


def test_workers_of_unequal_models_are_refused() -> None:
    with pytest.raises(ValueError, match="opt-66b"):
        run(PLACEMENTS["split"], of_role={Role.DECODE: PROFILES["a100-opt66b-tp4"]})


def test_the_wire_is_shared() -> None:
    """Two prefill workers, one decode worker: its bandwidth bounds how soon all KV is there."""
    network = NetworkModel(bytes_per_second=2e8)
    traffic = Traffic(name="many", classes=(TrafficClass(prompt=Lengths(400), output=Lengths(2)),))
    done, _ = run((Role.PREFILL, Role.PREFILL, Role.DECODE), traffic=traffic, requests=8, rate=1000.0, network=network)
    assert done.seconds > 8 * 400 * PROFILE.kv_bytes / 2e8
    assert_nothing_is_held(done)


def test_overload_is_refused_and_counts_as_missed() -> None:
    plan = ClusterPlan.of(PROFILE, (Role.MIXED,), "least_loaded")
    router = dataclasses.replace(plan.router, max_waiting=3, patience=2.0)
    engine = dataclasses.replace(plan.engine, max_num_seqs=2)
    done, arrivals = run((Role.MIXED,), rate=1000.0, engine=engine, router=router)
    refused = [outcome for outcome in done.outcomes if outcome.error is not None]
    assert {outcome.error for outcome in refused} <= {"queue_full", "no_room"}
    assert 0 < len(refused) < len(arrivals)
    assert not any(outcome.met for outcome in refused)
    assert all(outcome.ended is not None for outcome in done.outcomes)
    assert_nothing_is_held(done)


def test_what_decides_is_what_serves() -> None:
    """A simulated cluster consists of production classes: no scheduler, policy, lease or block is its own."""

    async def main(loop: VirtualLoop) -> set[type]:
        plan = ClusterPlan.of(PROFILE, PLACEMENTS["both"], "prefix_aware")
        async with SimulatedCluster(plan, ScriptedTexts(), 0) as cluster:
            placer = cluster.placers[0]
            parts: list[object] = [cluster.fleets[0], placer, placer.policy, placer.admission]
            for worker in cluster.workers.values():
                parts += [worker, worker.prefill, worker.engine, *worker.engine.schedulers, worker.kv]
                parts += [worker.kv.allocator, worker.context.locations, worker.events]
                parts += [worker.decode.table] if worker.decode is not None else []
            return {type(part) for part in parts}

    kinds = run_virtually(main)
    assert len(kinds) >= 13
    assert [kind for kind in kinds if kind.__module__.startswith(("deploy.simulator", "tests"))] == []


@pytest.mark.parametrize("routers", [1, 3])
def test_several_routers_hear_soon_of_the_prompts_that_one_of_them_sent(routers: int) -> None:
    """Before the worker's next turn to beat; a lone router knows what it has sent."""
    heard: list[int] = []

    async def look(cluster: SimulatedCluster) -> None:
        await asyncio.sleep(NEWS_AFTER + 0.01)
        for fleet in cluster.fleets:
            heard.extend(each.status.leases for each in fleet.registry.workers.values())

    plan = ClusterPlan.of(PROFILE, (Role.MIXED,), "goodput", routers=routers, heartbeat_interval=100.0)
    arrivals = trace(TRAFFIC["chat"], PROFILE, 1, 5)
    (outcome,) = simulate(plan, arrivals, 1.0, watch=look).outcomes
    assert outcome.met
    assert heard == ([1] * routers if routers > 1 else [0])
