"""A request that can meet its objectives nowhere goes on without them, where its class says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.explain import within_slo
from router.request_state import RequestState
from serving.errors import NoRoom
from serving.messages import Request, Slo
from serving.service_class import DEGRADED_PRIORITY, SERVICE_CLASSES, ServiceClass
from serving.step_cost import StepCost
from serving.timeline import Moment
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG

pytestmark = pytest.mark.usefixtures("ties_by_name")

COST = StepCost(fixed=0.001, token=0.001, samples=100, error=0.1)
SOON = ServiceClass(name="soon", ttft_slo_ms=1000.0, degrade=True)


def late(**fields: Any) -> World:
    world = World(policy="goodput", classes={**SERVICE_CLASSES, "soon": SOON}, **fields)
    world.add("a", step_cost=COST, waiting_seconds=6.0, waiting_tokens=6000)
    return world


def classed(name: str, known: ServiceClass, **fields: Any) -> Request:
    slo = Slo(ttft_ms=known.ttft_slo_ms, tpot_ms=known.tpot_slo_ms)
    return replace(wanted(name, **fields), service_class=known.name, priority=known.priority, slo=slo)


async def rest() -> None:
    """Until nothing moves any more by itself."""
    for _ in range(400):
        await asyncio.sleep(0)


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_request_of_a_class_that_degrades_goes_on_without_its_objectives_behind_all_others(
    max_tokens: int,
) -> None:
    world, request = late(), classed("r", SOON, max_tokens=max_tokens)
    assert await world.tokens(request) == expected(request)
    order = world.workers["a"].orders[0].order
    assert order.request.slo == Slo() and order.request.priority == DEGRADED_PRIORITY
    assert order.first_token_in is None
    placement, told = world.router.explained.placement("r"), world.router.explained.explain("r")
    assert placement is not None and placement["degraded"] == "slo"
    assert told is not None and told["degraded"] and told["objectives"]["ttft_ms"] == 1000.0
    assert world.held() == {}
    await world.fleet.close()


async def test_one_that_can_be_in_time_keeps_its_objectives() -> None:
    world = World(policy="goodput", classes={**SERVICE_CLASSES, "soon": SOON})
    world.add("a", step_cost=COST)
    request = classed("r", SOON)
    assert await world.tokens(request) == expected(request)
    assert world.workers["a"].orders[0].order.request.slo == request.slo
    placement = world.router.explained.placement("r")
    assert placement is not None and placement["degraded"] == ""
    await world.fleet.close()


async def test_one_that_degrades_queues_up_again_behind_those_that_wait() -> None:
    """The worker is full; it is late meanwhile, and others of no objective go first although they came later."""
    world = World(policy="goodput", classes={**SERVICE_CLASSES, "soon": SOON})
    worker = world.add("a", step_cost=COST, max_seqs=1)
    worker.script.decode = [(2, HANG)]
    running = [asyncio.create_task(world.tokens(wanted("first")))]
    await rest()
    running.append(asyncio.create_task(world.tokens(classed("late", SOON))))
    await rest()
    world.now += 2.0
    running += [asyncio.create_task(world.tokens(wanted(str(number)))) for number in range(3)]
    world.beat()
    await rest()
    assert world.placer.admission.waiting == 4
    running[0].cancel()
    await asyncio.wait_for(asyncio.gather(*running[1:]), 60)
    assert [order.order.request.request_id for order in worker.orders] == ["first", "0", "1", "2", "late"]
    await world.settled()
    assert world.held() == {}
    await world.fleet.close()


async def test_a_text_that_has_begun_keeps_its_objectives() -> None:
    world = World(policy="goodput", classes={**SERVICE_CLASSES, "soon": SOON})
    worker, request = world.add("a", step_cost=COST), classed("r", SOON)
    worker.script.decode = [(2, NoRoom("preempted"))]
    running = asyncio.create_task(world.tokens(request))
    while not world.seen.replacements:
        await asyncio.sleep(0)
    world.fleet.heartbeat(worker.change(waiting_seconds=6.0))
    assert await running == expected(request)
    assert {order.order.request.slo for order in worker.orders} == {request.slo}
    await world.fleet.close()


@given(st.floats(0.0, 5.0))
def test_one_that_was_degraded_is_judged_by_what_it_came_with(seconds: float) -> None:
    judged = RequestState(request=classed("r", SOON))
    judged.degrade()
    assert judged.asked.slo == Slo(ttft_ms=1000.0) and judged.request.slo == Slo()
    judged.timeline.note(Moment.ARRIVED, 100.0)
    judged.timeline.note(Moment.FIRST_TOKEN, 100.0 + seconds)
    assert within_slo(judged) == (100.0 + seconds - 100.0 <= 1.0)
