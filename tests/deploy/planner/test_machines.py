"""The planner's machines are the simulator's: one roofline, and links that both understand alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.planner.attainment import AttainmentGoal
from deploy.planner.candidates import SearchSpace, usable_shapes
from deploy.planner.costs import StageCosts
from deploy.planner.machines import AS_PROFILED, MACHINES, MODELS, Machines, profiled
from deploy.planner.placements import InstanceShape, disaggregated
from deploy.planner.queueing import QueueingModel, QueueingRules
from deploy.planner.simulated import SimulatedModel, _plan
from deploy.planner.written import answer_json, placement_file
from deploy.simulator.hardware import Hardware, ModelShape, Roofline, roofline_profile
from deploy.simulator.profiles import Fitted, Profile, StepWork
from serving.step_cost import StepCost
from tests.deploy.planner.questions import answered, load, question, traffic

H100 = MACHINES["h100-80g"]
SHAPES = st.sampled_from([InstanceShape(tp) for tp in (1, 2, 4, 8)])


def test_a_worker_planned_is_the_worker_simulated() -> None:
    """The figures of [hardware] and [model] give the profile that a description of the same has."""
    llama = ModelShape(
        name="llama-3-8b", parameters=8.03e9, layers=32, hidden=4096, kv_heads=8, head_dim=128, max_model_len=8192
    )
    h100 = Hardware(flops=989e12, bandwidth=3.35e12, memory=H100.memory, devices=2, link=450e9)
    planned = MODELS["llama-3-8b"].profile(H100, InstanceShape(2))
    assert planned == roofline_profile("llama-3-8b-tp2", llama, h100)


@given(st.integers(1, 4), st.integers(0, 64), st.integers(0, 2000))
def test_stages_of_a_roofline_share_what_it_computes(stages: int, decoding: int, prompt: int) -> None:
    """What is around a step comes once; the rest is shared, and passed on in a millisecond for each stage."""
    work = StepWork(decoding=decoding, decoding_context=300 * decoding)
    work.add_prompt(0, prompt)
    profile = MODELS["llama-3-8b"].profile(H100, InstanceShape())
    assert isinstance(profile.steps, Roofline)
    stage, whole = StageCosts(profile, stages).seconds(work)
    around = profile.steps.hardware.step_seconds - 1e-3
    computing = profile.seconds(work) - around - 1e-3
    assert stage == pytest.approx(computing / stages + stages * 1e-3 + around)
    assert whole == pytest.approx(computing + stages * stages * 1e-3 + around)


@given(SHAPES, SHAPES)
def test_a_handoff_takes_the_links_of_the_smaller_worker(prefill: InstanceShape, decode: InstanceShape) -> None:
    """Of a device's bytes/s, the simulator's worker and the queues' make the same."""
    placement, model = disaggregated(prefill, 1, decode, 1, 512), MODELS["llama-3-8b"]
    profiles = tuple((InstanceShape(tp), model.profile(H100, InstanceShape(tp))) for tp in (1, 2, 4, 8))
    simulated = _plan(SimulatedModel(profiles, H100.network), placement).network.bytes_per_second
    assert simulated == min(prefill.devices, decode.devices) * H100.network


def test_queues_feel_the_links_of_every_device() -> None:
    """A link of half the speed on twice the devices is the same to them."""
    model, goal, made = MODELS["llama-3-8b"], AttainmentGoal(share=0.01), load(traffic(), requests=20)
    one, two = InstanceShape(), InstanceShape(2)
    same = model.profile(H100, one)
    slow = QueueingRules(kv_bytes=model.kv_bytes, layers=1, link_bytes_per_second=1e8)
    fast = replace(slow, link_bytes_per_second=2e8)
    over_two = QueueingModel(((two, same),), slow).attainment(disaggregated(two, 1, two, 1, 512), made, 1.0, 0, goal)
    over_one = QueueingModel(((one, same),), fast).attainment(disaggregated(one, 1, one, 1, 512), made, 1.0, 0, goal)
    assert over_two == over_one
    assert over_one != QueueingModel(((one, same),), slow).attainment(
        disaggregated(one, 1, one, 1, 512), made, 1.0, 0, goal
    )


def test_machines_as_fast_as_the_measured_ones_take_their_tables() -> None:
    assert MODELS["opt-13b"].tables(Machines(nodes=4, network=1e9)) and not MODELS["opt-13b"].tables(H100)


def worker(**fields: Any) -> Profile:
    """Like one of SmolLM2 on a thread: 10 ms a step, 0.9 ms a token, 0.1 ms a sequence."""
    cost = StepCost(fixed=9e-3, token=8.5e-4, pair=2e-7, sequence=1e-4, context=1e-6)
    return Profile(**{"name": "w", "model": "/models/some", "steps": Fitted(cost), "kv_tokens": 16_384,
                      "kv_bytes": 23_040, "layers": 30, **fields})  # fmt: skip


def test_a_worker_that_was_profiled_is_planned_as_it_is() -> None:
    profile = worker()
    model = profiled(profile)
    assert model.name == "some" and model.profile(AS_PROFILED, InstanceShape()) == profile
    shapes, rejected = usable_shapes(model, AS_PROFILED, SearchSpace(tp=(1, 2), pp=(1, 2)))
    assert shapes == [InstanceShape()] and {each.reason for each in rejected} == {
        "the worker that was profiled has one device"
    }


def test_short_prompts_and_long_answers_are_not_split() -> None:
    """On two devices like the worker's own: of two workers one would hardly have anything to do."""
    model, kind = profiled(worker()), traffic(prompt=64, output=128, ttft_ms=1000, tpot_ms=30)
    made = replace(load(kind, requests=120), profile=worker())
    machines = replace(AS_PROFILED, devices_per_node=2)
    space = SearchSpace(tp=(1,), budgets=(512,))
    answer, _ = answered(question(2, model=model, machines=machines, load=made, space=space))
    assert answer.ratio is not None and answer.ratio < 0.9
    told = orjson.loads(answer_json(answer))
    assert told["verdict"].startswith("Do not disaggregate") and told["ratio"] == answer.ratio
    assert {each["split"] for each in told["ranked"]} == {True, False}
    assert {"mixed": 2} in [each["workers"] for each in told["ranked"]]
    best = answer.best()
    assert best is not None and "cuda" not in placement_file(best, "some", machines)
