"""Which placements there are: none beyond memory, nodes or divisors, and more devices never take one away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.planner.candidates import SearchSpace, packs, placements, usable_shapes, why_not
from deploy.planner.machines import MODELS, Machines, roofline
from deploy.planner.placements import CandidatePlacement, InstanceShape, aggregated, disaggregated
from deploy.simulator.hardware import USABLE_MEMORY

SPACE = SearchSpace(tp=(1, 2, 3, 4, 8), pp=(1, 2), budgets=(512,))
MODEL_NAMES = st.sampled_from(("opt-13b", "opt-66b", "llama-3-8b"))


def every(name: str, machines: Machines, space: SearchSpace = SPACE) -> set[CandidatePlacement]:
    model = MODELS[name]
    return set(placements(model, machines, space, usable_shapes(model, machines, space)[0]))


@given(MODEL_NAMES, st.integers(1, 2), st.sampled_from((1, 2, 4, 6)), st.integers(10, 80))
def test_no_placement_exceeds_memory_devices_or_a_node(name: str, nodes: int, per_node: int, memory: int) -> None:
    model, machines = MODELS[name], Machines(nodes=nodes, devices_per_node=per_node, memory=memory * 2.0**30)
    for placement in every(name, machines):
        assert placement.devices <= machines.devices
        for shape in placement.shapes:
            assert model.heads % shape.tp == 0 and model.layers % shape.pp == 0 and shape.tp <= per_node
            held = model.weights + model.max_model_len * model.kv_bytes
            assert held <= USABLE_MEMORY * machines.memory * shape.devices


@given(MODEL_NAMES, st.integers(1, 2), st.sampled_from((1, 2, 4)))
def test_more_nodes_take_no_aggregated_or_free_placement_away(name: str, nodes: int, per_node: int) -> None:
    space = replace(SPACE, tied=False)
    few = every(name, Machines(nodes=nodes, devices_per_node=per_node), space)
    assert few <= every(name, Machines(nodes=nodes + 1, devices_per_node=per_node), space)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("opt-66b", InstanceShape(1), "does not fit memory: weights of 121 GiB"),
        ("opt-66b", InstanceShape(16), "16 is no divisor of 72 heads"),
        ("opt-13b", InstanceShape(8), "TP across nodes: a node has 4 devices"),
        ("opt-13b", InstanceShape(1, 3), "3 is no divisor of 40 layers"),
        ("opt-13b", InstanceShape(4, 4), "16 devices of 8"),
        ("opt-66b", InstanceShape(3), "no step times of TP 3, but of 2, 4, 8"),
    ],
)
def test_reasons_name_what_is_in_the_way(name: str, shape: InstanceShape, words: str) -> None:
    reason = why_not(MODELS[name], Machines(nodes=2, devices_per_node=4), shape)
    assert reason is not None and words in reason


@pytest.mark.parametrize(
    ("name", "tp", "pp", "tokens"),
    [("opt-13b", 1, 1, 66_144), ("opt-13b", 2, 4, 744_224), ("opt-66b", 2, 1, 11_600), ("opt-66b", 4, 4, 479_936)],
)
def test_kv_room_is_that_of_distserves_table(name: str, tp: int, pp: int, tokens: int) -> None:
    assert MODELS[name].kv_tokens(Machines(), InstanceShape(tp, pp)) == pytest.approx(tokens, rel=0.04)


def test_the_roofline_is_near_the_measured_steps() -> None:
    model = MODELS["opt-13b"]
    measured, drawn = model.measured[1], roofline(model, Machines(), 1, 66_144)
    assert drawn.prompt_seconds(512) == pytest.approx(measured.prompt_seconds(512), rel=0.1)
    assert drawn.decode_seconds(32, 700) == pytest.approx(measured.decode_seconds(32, 700), rel=0.1)


def test_units_keep_both_phases_inside_a_node() -> None:
    tied = every("opt-13b", Machines(nodes=2, devices_per_node=4), SearchSpace(free=False, mixed=False))
    units = [placement for placement in tied if placement.units > 1]
    assert units
    assert all(placement.devices // placement.units <= 4 for placement in tied if placement.split)


def test_stages_over_nodes_are_units_of_one_pair() -> None:
    found = every(
        "opt-66b", Machines(nodes=2, devices_per_node=8), SearchSpace(tp=(4,), pp=(2,), free=False, mixed=False)
    )
    pair = InstanceShape(4, 2)
    assert disaggregated(pair, 1, pair, 1, 2048) in found


def test_a_placement_has_to_pack_into_nodes() -> None:
    machines = Machines(nodes=2, devices_per_node=4)
    assert packs(aggregated(InstanceShape(4), 2, 512), machines)
    assert not packs(disaggregated(InstanceShape(3), 2, InstanceShape(2), 1, 512), machines)
