"""What a worker decides with by requests' objectives: each part can be switched off, and costs come from one place."""

from __future__ import annotations

import pytest

from decode.tpot_bound import TpotBound
from deploy.worker.build import objectives_parts
from prefill.chunking import FLOOR, FixedChunks, SlackChunks
from prefill.ordering import FirstComeFirstServed, SlackOrder
from serving.config import EngineConfig
from serving.messages import Role
from serving.step_cost import StepCost
from tests.decode.workers import Worker


def test_by_default_all_go_by_objectives_and_by_the_workers_own_cost() -> None:
    cost = StepCost(fixed=1.0, token=1.0)
    parts = objectives_parts(Role.MIXED, EngineConfig(), lambda: cost)
    assert isinstance(parts.order, SlackOrder) and parts.order.cost() is cost
    assert isinstance(parts.chunks, SlackChunks) and parts.chunks.cost() is cost
    assert isinstance(parts.bound, TpotBound) and parts.bound.cost() is cost


@pytest.mark.parametrize("role", Role)
def test_only_a_worker_that_computes_prompts_beside_decodes_leaves_them_room(role: Role) -> None:
    bound = objectives_parts(role, EngineConfig(), lambda: None).bound
    assert isinstance(bound, TpotBound)
    assert (bound.prompts, bound.share < 0.9) == (role is Role.MIXED, role is Role.MIXED)


@pytest.mark.parametrize("role", Role)
async def test_only_where_prompts_are_computed_beside_decodes_do_drafts_leave_them_some(role: Role) -> None:
    assert Worker(role).decoding.for_prompts == (FLOOR if role is Role.MIXED else 0)


def test_each_part_can_be_switched_off() -> None:
    config = EngineConfig(chunking="fixed", prefill_order="fcfs", tpot_admission=False)
    parts = objectives_parts(Role.MIXED, config, lambda: None)
    assert isinstance(parts.order, FirstComeFirstServed) and isinstance(parts.chunks, FixedChunks)
    assert parts.bound is None
