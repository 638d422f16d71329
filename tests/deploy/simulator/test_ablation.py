"""What is switched off is off, nothing else is, and the cluster still serves."""

from __future__ import annotations

import dataclasses

import pytest

from deploy.cli import make_parser
from deploy.simulator.ablation import ABLATIONS, without
from deploy.simulator.cluster import ClusterPlan, SimulatedCluster
from deploy.simulator.command import studies_of
from deploy.simulator.drafts import DraftModel
from deploy.simulator.profiles import PROFILES
from deploy.simulator.run import simulate
from deploy.simulator.study import Study
from deploy.simulator.texts import ScriptedTexts
from deploy.simulator.traffic import TRAFFIC, trace
from deploy.simulator.virtual_loop import VirtualLoop, run_virtually
from serving.messages import Role

PLAN = ClusterPlan.of(PROFILES["a100-opt13b"], (Role.MIXED, Role.PREFILL, Role.DECODE), "goodput").with_drafts(
    DraftModel()
)
CHANGED = {
    "score": {"policy"},
    "affinity": {"prefix_index_bytes"},
    "order": {"prefill_order"},
    "chunk": {"chunking"},
    "drafts": {"num_speculative_tokens"},
    "bound": {"tpot_admission"},
    "shedding": {"classes"},
}


def changed(one: object, other: object) -> set[str]:
    """Names of the fields of two dataclasses that differ."""
    fields = dataclasses.fields(one)  # type: ignore[arg-type]
    return {each.name for each in fields if getattr(one, each.name) != getattr(other, each.name)}


@pytest.mark.parametrize("name", ABLATIONS)
def test_one_thing_is_switched_off(name: str) -> None:
    found = without(PLAN, name)
    assert changed(PLAN.router, found.router) | changed(PLAN.engine, found.engine) == CHANGED[name]
    assert changed(PLAN, found) <= {"router", "engine"} | ({"drafts"} if name == "drafts" else set())


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_cluster_serves_without_it(name: str) -> None:
    arrivals = trace(TRAFFIC["shared-prefix"], PLAN.profile, 25, 1)
    done = simulate(without(PLAN, name), arrivals, 8.0, seed=1)
    assert all(outcome.finish is not None for outcome in done.outcomes)


def test_without_affinity_the_router_knows_of_no_prefix() -> None:
    async def known(loop: VirtualLoop, plan: ClusterPlan) -> int:
        async with SimulatedCluster(plan, ScriptedTexts(), 0) as cluster:
            assert cluster.fleets[0].prefixes is not None
            cluster.fleets[0].prefixes.stored("mixed-0-life", [bytes([n]) * 32 for n in range(40)])
            return sum(cluster.fleets[0].prefixes.match([bytes([n]) * 32 for n in range(40)]).values())

    assert run_virtually(lambda loop: known(loop, PLAN)) == 40
    assert run_virtually(lambda loop: known(loop, without(PLAN, "affinity"))) == 0


def test_what_cannot_be_switched_off_is_refused() -> None:
    with pytest.raises(ValueError, match="--without everything"):
        without(PLAN, "everything")


def test_each_is_switched_off_in_turn_beside_the_whole() -> None:
    options = make_parser().parse_args(
        ["simulate", "--policy", "goodput", "--without", "score,chunk", "--chunking", "slack"]
    )
    found = studies_of(options)
    assert list(found) == ["goodput", "goodput without score", "goodput without chunk"]
    assert found["goodput without score"].plan.router.policy == "least_loaded"
    assert [study.plan.engine.chunking for study in found.values()] == ["slack", "slack", "fixed"]


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        (["--chunking", "fixed"], "chunking", "fixed"),
        (["--prefill-order", "fcfs"], "prefill_order", "fcfs"),
        (["--no-tpot-admission"], "tpot_admission", False),
        (["--max-num-batched-tokens", "128"], "max_num_batched_tokens", 128),
    ],
)
def test_the_workers_flags_are_taken(flag: list[str], name: str, value: object) -> None:
    plain, given = (
        next(iter(studies_of(make_parser().parse_args(["simulate", *each])).values())).plan.engine
        for each in ([], flag)
    )
    assert changed(plain, given) == {name} and getattr(given, name) == value


def test_a_rate_that_fails_already_is_not_run_with_more_seeds() -> None:
    """Far beyond what the workers can do, the first seed misses more than all may."""
    study = Study(plan=PLAN, traffic=TRAFFIC["chat"], requests=30, seeds=(0, 1, 2))
    hopeless = study.at(500.0, wanted=0.9)
    assert hopeless.offered == 30 and hopeless.attainment < 0.9
    assert study.at(500.0).offered == 90
    assert study.at(5.0, wanted=0.9).offered == 90


def test_seeds_beside_each_other_give_what_they_give_one_after_the_other() -> None:
    """In processes of their own; told of all requests but the last few of each."""
    study = Study(plan=PLAN, traffic=TRAFFIC["chat"], requests=40, seeds=(0, 1))
    counted: list[int] = []
    assert dataclasses.replace(study, jobs=2).at(5.0, counted.append) == study.at(5.0)
    assert sum(counted) <= 80
