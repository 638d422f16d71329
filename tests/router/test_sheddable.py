"""What its class refuses once it is late, or has go on without objectives: workers are told, and hand it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from router.fleet import Fleet, RouterConfig
from router.placer import Placer
from router.policies import make_policy
from router.router import Router
from serving.errors import LATE, NoRoom, Overloaded, Preempted
from serving.messages import LeaseOrder, Request, Role, Slo, WorkerStatus
from serving.service_class import DEGRADED_PRIORITY, SERVICE_CLASSES, ServiceClass
from tests.router.conftest import Recorder, World, expected, wanted
from tests.router.remote import Remote
from tests.router.scripted import ScriptedSession, Step
from tests.router.test_degrade import COST, SOON, classed, rest
from tests.router.test_giving_way import prefilling

pytestmark = pytest.mark.usefixtures("ties_by_name")
CLASSES = {**SERVICE_CLASSES, "soon": SOON}
QUEUES = ServiceClass(name="standard", ttft_slo_ms=1000.0)
HANGS = 30.0  # seconds
DUE_MS = 3000.0  # milliseconds: in which a slow machine gets all requests to the worker


async def ordered(
    known: ServiceClass, *, policy: str = "goodput", cost: bool = True, tokens: int = 8, alone: bool = True
) -> LeaseOrder:
    world = World(policy=policy, classes=CLASSES)
    worker = world.add("a", step_cost=COST if cost else None)
    request = replace(classed("r", known, max_tokens=tokens), alone=alone)
    assert await world.tokens(request) == expected(request)
    await world.fleet.close()
    return worker.orders[0].order


@pytest.mark.parametrize("tokens", [1, 8])
async def test_a_worker_is_told_what_may_be_shed_where_the_router_would_judge_it_again(tokens: int) -> None:
    interactive = SERVICE_CLASSES["interactive"]
    assert (await ordered(interactive, tokens=tokens)).sheddable and (await ordered(SOON, tokens=tokens)).sheddable
    assert not (await ordered(QUEUES, tokens=tokens)).sheddable, "it waits as long as it takes"
    assert not (await ordered(interactive, policy="round_robin", tokens=tokens)).sheddable, "no better queue is known"
    assert not (await ordered(interactive, cost=False, tokens=tokens)).sheddable
    assert not (await ordered(interactive, alone=False, tokens=tokens)).sheddable, "the other choices would end with it"


@pytest.mark.parametrize("tokens", [1, 8])
async def test_one_that_comes_back_late_is_refused(tokens: int) -> None:
    world, back = World(policy="goodput", classes=CLASSES), asyncio.Event()
    worker = world.add("a", step_cost=COST)
    running = await waiting(world, SERVICE_CLASSES["interactive"], tokens, back)
    await a_queue_later(world, back)
    with pytest.raises(Overloaded, match="ttft_slo_ms is over") as refused:
        await asyncio.wait_for(running, HANGS)
    assert refused.value.code == "slo" and refused.value.retry_after is not None
    assert len(worker.orders) == 1
    assert world.router.explained.counts["interactive"].outcomes["refused"] == 1
    await ended(world)


@pytest.mark.parametrize("tokens", [1, 8])
async def test_one_that_comes_back_late_goes_on_without_its_objectives_where_its_class_says_so(tokens: int) -> None:
    world, back = World(policy="goodput", classes=CLASSES), asyncio.Event()
    worker = world.add("a", step_cost=COST)
    running = await waiting(world, SOON, tokens, back)
    await a_queue_later(world, back)
    assert await asyncio.wait_for(running, HANGS) == expected(classed("r", SOON, max_tokens=tokens))
    again = worker.orders[1].order
    assert again.request.slo == Slo() and again.request.priority == DEGRADED_PRIORITY and not again.sheddable
    await ended(world)


@pytest.mark.parametrize("tokens", [1, 8])
async def test_one_that_takes_longer_than_its_objective_is_handed_back_once_at_most(tokens: int) -> None:
    """It is sent where nothing waits, as far as the router knows: again, and late, so that it waits on there."""
    world, back = World(policy="goodput", classes=CLASSES), asyncio.Event()
    worker = world.add("a", step_cost=COST)
    hurried = replace(SERVICE_CLASSES["interactive"], ttft_slo_ms=1.0)
    running = await waiting(world, hurried, tokens, back)
    world.now += 2.0
    world.beat()
    back.set()
    assert await asyncio.wait_for(running, HANGS) == expected(classed("r", hurried, max_tokens=tokens))
    left = [each.order.first_token_in for each in worker.orders]
    assert left[0] == pytest.approx(1e-3) and left[1] == pytest.approx(-1.999) and len(left) == 2
    await ended(world)


async def test_a_lease_is_kept_where_a_prefill_elsewhere_lost_its_blocks_and_given_up_where_it_was_late() -> None:
    for code, leases in ((None, 1), (LATE, 2)):
        world = World(policy="goodput", classes=CLASSES)
        prefill, decode = world.add("p", Role.PREFILL, step_cost=COST), world.add("d", Role.DECODE, step_cost=COST)
        prefill.script.before_first = [Preempted("its blocks went to others", code=code)]
        request = classed("r", SERVICE_CLASSES["interactive"], max_tokens=8)
        assert await world.tokens(request) == expected(request)
        assert len(prefill.orders) == 2 and len(decode.opened) == leases
        assert [each.order.lease.epoch for each in prefill.orders] == ([0, 1] if code is None else [0, 0])
        await ended(world)


@pytest.mark.parametrize("known", [SOON, SERVICE_CLASSES["interactive"]])
async def test_one_that_comes_back_late_is_let_into_a_full_queue(known: ServiceClass) -> None:
    """It had a place. Its class decides what becomes of it, and not who came to wait since."""
    world, back = World(policy="goodput", classes=CLASSES, max_waiting=0), asyncio.Event()
    worker = world.add("a", step_cost=COST, max_seqs=1)
    running = await waiting(world, known, 8, back)
    other = asyncio.create_task(world.tokens(wanted("other")))
    await world.settled()
    with pytest.raises(Overloaded) as refused:
        await world.tokens(wanted("newcomer"))
    assert refused.value.code == "queue_full"
    await a_queue_later(world, back)
    if known is SOON:
        assert await asyncio.wait_for(running, HANGS) == expected(classed("r", known, max_tokens=8))
    else:
        with pytest.raises(Overloaded, match="ttft_slo_ms is over"):
            await asyncio.wait_for(running, HANGS)
    assert await asyncio.wait_for(other, HANGS) == expected(wanted("other"))
    assert len(worker.orders) == (3 if known is SOON else 2)
    await ended(world)


async def test_one_that_waits_and_degrades_keeps_its_turn_in_a_queue_that_returners_have_filled() -> None:
    """It leaves the queue and joins it again, without its objectives."""
    world, back = World(policy="goodput", classes=CLASSES, max_waiting=0), asyncio.Event()
    worker = world.add("a", step_cost=COST, max_seqs=1)
    running = await waiting(world, SOON, 8, back)
    request = classed("waits", replace(SOON, ttft_slo_ms=60000.0), max_tokens=8)
    waits = asyncio.create_task(world.tokens(request))
    await rest()
    worker.script.open = [NoRoom("full", code="blocks")] * 100
    await a_queue_later(world, back)
    await rest()
    assert world.placer.admission.waiting == 2
    world.now += 70.0
    world.fleet.heartbeat(worker.change(waiting_seconds=6.0, waiting_tokens=6000))
    await rest()
    worker.script.open.clear()
    world.beat()
    assert await asyncio.wait_for(running, HANGS) == expected(classed("r", SOON, max_tokens=8))
    assert await asyncio.wait_for(waits, HANGS) == expected(request)
    await ended(world)


async def test_a_tenant_is_charged_for_the_place_of_what_comes_back_and_not_for_the_next_one() -> None:
    """It held room that others had not: were it free, a tenant whose prompts are all late would always be next."""
    for known in (SERVICE_CLASSES["interactive"], SOON):
        world, back = World(policy="goodput", classes=CLASSES), asyncio.Event()
        world.add("a", step_cost=COST)
        shares = world.placer.admission.shares
        running = await waiting(world, known, 8, back)
        once = shares.served("")
        assert once > 0
        await a_queue_later(world, back)
        await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), HANGS)
        assert shares.served("") == once
        await ended(world)


async def test_a_worker_that_says_late_before_it_is_ends_a_prompt_once() -> None:
    """Its timer is early, or its clock another: the request is sent again at once, and is not to be ended for ever."""
    world = World(policy="goodput", classes=CLASSES)
    worker = world.add("a", step_cost=COST)
    play, told = worker.play, 0

    async def too_soon(steps: list[Step], session: ScriptedSession | None = None) -> Step:
        nonlocal told
        if steps is worker.script.before_first and worker.orders[-1].order.sheddable and told < 100:
            told += 1
            raise Preempted("late", code=LATE)
        return await play(steps, session)

    worker.play = too_soon  # type: ignore[method-assign]
    request = classed("r", SERVICE_CLASSES["interactive"], max_tokens=8)
    assert await asyncio.wait_for(world.tokens(request), HANGS) == expected(request)
    assert told == 1
    await ended(world)


async def waiting(world: World, known: ServiceClass, tokens: int, back: asyncio.Event) -> asyncio.Task[list[int]]:
    """A request that waits at the worker, which hands it back when `back` is set."""
    worker, handed = world.workers["a"], asyncio.Event()
    play = worker.play

    async def hand_back(steps: list[Step], session: ScriptedSession | None = None) -> Step:
        if steps is not worker.script.before_first or handed.is_set():
            return await play(steps, session)
        await back.wait()
        handed.set()
        raise Preempted("late", code=LATE)

    worker.play = hand_back  # type: ignore[method-assign]
    running = asyncio.create_task(world.tokens(classed("r", known, max_tokens=tokens)))
    await prefilling(world, "a")
    return running


async def a_queue_later(world: World, back: asyncio.Event) -> None:
    """Its first token is late by now, and others would go first anyhow."""
    world.now += 2.0
    world.fleet.heartbeat(world.workers["a"].change(waiting_seconds=6.0, waiting_tokens=6000))
    back.set()


async def ended(world: World) -> None:
    await world.settled()
    world.now += 1.0
    world.beat()  # by when what was sent and is over counts no more
    assert world.held() == {}
    world.check_cancelled_once()
    await world.fleet.close()


# ---- a router and a worker of its own, over gRPC -------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["interactive", "soon"])
async def test_late_prompts_are_refused_or_degraded_while_the_worker_is_busy(
    remote: Remote, name: str, tokens: int
) -> None:
    worker, classes = remote.worker, CLASSES
    worker.engine.clock = time.monotonic
    config = RouterConfig(patience=HANGS, retry_pause=0.0, policy="goodput", classes=classes)
    fleet = Fleet(config, lambda status: remote.link, clock=time.monotonic)
    router = Router(Placer(fleet, make_policy("goodput")), Recorder())

    def status(**waiting: Any) -> WorkerStatus:
        fields = {"step_cost": COST, "address": remote.address, "max_batched_tokens": 8, **waiting}
        return replace(worker.worker.status(), **fields)

    async def tokens_of(request: Request) -> list[int]:
        return [token async for delta in router.generate(request) for token in delta.tokens]

    fleet.heartbeat(status())
    remote.gate.clear()
    first = asyncio.create_task(tokens_of(classed("first", classes["standard"], max_tokens=5)))
    await until(lambda: bool(worker.runner.counts))
    requests = [classed(f"r{each}", replace(classes[name], ttft_slo_ms=DUE_MS), max_tokens=tokens) for each in range(4)]
    running = [asyncio.create_task(tokens_of(request)) for request in requests]
    await until(lambda: len(worker.prefill.sequences()) == 5)
    fleet.heartbeat(status(waiting_seconds=60.0, waiting_tokens=60_000))
    await until(lambda: worker.prefill.late == 4)
    remote.gate.set()
    for request, found in zip(requests, await asyncio.gather(*running, return_exceptions=True), strict=True):
        if name == "soon":
            assert found == expected(request)
        else:
            assert isinstance(found, Overloaded) and found.code == "slo"
    assert len(await first) == 5
    await remote.gone()
    assert fleet.open_leases == fleet.prefill_only_leases == fleet.running_prefills == router.running == 0
    assert worker.kv.unaccounted([]) == 0
    await fleet.close()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANGS):
        while not reached():
            await asyncio.sleep(0.001)
