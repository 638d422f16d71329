"""Requests whose leases gave way to others: nobody is blamed for it, charged for it, or kept out by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from serving.errors import MillraceError, NoRoom, Overloaded, Preempted, WorkerLost
from serving.links import LeaseEvent
from serving.messages import LeaseGrant, LeaseOrder, Role, Slo
from tests.fakes.loop_time import passing_time
from tests.fakes.sequences import make_order
from tests.router.conftest import World, expected, wanted
from tests.router.remote import PROMPT, Remote
from tests.router.scripted import HANG, ScriptedSession

pytestmark = pytest.mark.usefixtures("ties_by_name")
LATE_MS, TTFT_MS = 1.0, 60_000.0
HANGS = 30.0  # seconds


def gives_way(world: World, name: str, lease: str) -> None:
    """The worker ends the lease."""
    for session in world.workers[name].sessions:
        if session.leases.pop(lease, None) is not None:
            session.deliver([LeaseEvent(lease, 0, error=Preempted("late"))])


async def prefilling(world: World, name: str) -> str:
    """The lease of the prefill that a worker has in hand."""
    worker = world.workers[name]
    while not worker.runs:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return worker.orders[-1].order.lease.lease


async def test_what_the_prefill_says_of_a_lease_that_gave_way_blames_nobody(world: World) -> None:
    """The lease's end is told first; then its prefill, in the same worker, raises WorkerLost (prefill.worker)."""
    for name in ("m0", "m1"):
        world.add(name, Role.MIXED)
    world.workers["m0"].script.before_first = [WorkerLost("the lease ended before its prefill began")]
    running = asyncio.create_task(world.tokens(wanted()))
    while not world.workers["m0"].runs:
        await asyncio.sleep(0)
    gives_way(world, "m0", world.workers["m0"].orders[-1].order.lease.lease)
    while not world.seen.replacements:
        await asyncio.sleep(0)
    suspects = [name for lost in world.placer.quarantine._lost.values() for name in lost.suspects]
    found = {
        "told": [type(error).__name__ for error in world.seen.replacements],
        "suspected of killing it": suspects,
        "suspect": world.fleet.registry.get("m0-life").suspect,
    }
    assert await running == expected(wanted())
    assert found == {"told": ["Preempted"], "suspected of killing it": [], "suspect": False}


async def test_a_tenant_is_charged_once_for_a_request_that_gave_way(world: World) -> None:
    world.add("m0", Role.MIXED)
    world.workers["m0"].script.before_first = [HANG]
    running = asyncio.create_task(world.tokens(wanted()))
    lease = await prefilling(world, "m0")
    tenant, shares = "", world.placer.admission.shares
    once = shares.served(tenant)
    gives_way(world, "m0", lease)
    await running
    assert once > 0.0 and shares.served(tenant) == once, "it has been served nothing yet when it gave way"


async def refuse_late(self: ScriptedSession, order: LeaseOrder) -> LeaseGrant:
    """A full worker whose late leases give way to what is in time."""
    await asyncio.sleep(0)
    self.worker.opened[order.lease.lease] += 1
    if order.first_token_in is not None and order.first_token_in <= 0.0:
        raise NoRoom("full")
    return self._enter(order)


async def test_who_others_would_give_way_to_is_not_kept_back_by_one_that_is_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late request finds no room and waits; one in time, as large, would: it has to be allowed to ask."""
    monkeypatch.setattr(ScriptedSession, "open", refuse_late)
    world.add("m0", Role.MIXED)
    late = asyncio.create_task(world.tokens(wanted("late", slo=Slo(ttft_ms=LATE_MS))))
    await asyncio.sleep(0)  # it has arrived
    world.now += 1.0
    await world.settled()
    assert world.placer.admission.waiting == 1
    in_time = asyncio.create_task(world.tokens(wanted("in-time", slo=Slo(ttft_ms=TTFT_MS))))
    try:
        async with asyncio.timeout(HANGS):
            assert await asyncio.shield(in_time) == expected(wanted("in-time"))
    finally:
        for task in (late, in_time):
            task.cancel()
        await asyncio.gather(late, in_time, return_exceptions=True)


async def test_a_worker_that_refused_a_late_request_is_asked_by_one_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than MOST_ASKED workers, all full of late leases: the one in time need not wait for a heartbeat."""
    monkeypatch.setattr(ScriptedSession, "open", refuse_late)
    for number in range(12):
        world.add(f"m{number:02}", Role.MIXED)
    late = asyncio.create_task(world.tokens(wanted("late", slo=Slo(ttft_ms=LATE_MS))))
    await asyncio.sleep(0)
    world.now += 1.0
    for _ in range(4):  # looks
        await world.settled()
        world.fleet.notify()
    await world.settled()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert all(worker.opened for worker in world.workers.values())
    request = wanted("in-time", slo=Slo(ttft_ms=TTFT_MS))
    async with asyncio.timeout(HANGS):
        assert await world.tokens(request) == expected(request)


async def test_over_the_wire_too_a_prefill_whose_lease_gave_way_is_no_lost_worker(remote: Remote) -> None:
    """The worker asks the KV pool for a late prompt when the lease gives way, and is answered just then."""
    answered = asyncio.Event()

    class Pool:
        async def bring(self, seq: object, begun: object) -> None:
            await answered.wait()

    remote.worker.prefill.prefixes = Pool()
    session = await remote.connect()
    order = make_order(PROMPT, lease=remote.worker.fence("r/1"), max_tokens=5, prefill=True, first_token_in=-1.0)
    grant = await session.open(order)
    waiting = asyncio.create_task(anext(remote.link.run(remote.prefill(grant))))
    await asyncio.sleep(0.05)
    remote.worker.engine.limits = replace(remote.worker.engine.limits, max_num_seqs=1)
    answered.set()
    newcomer = make_order([7, 8], lease=remote.worker.fence("r/2"), max_tokens=5, first_token_in=1.0)
    remote.worker.decode.open(newcomer, next(iter(remote.worker.decode.sessions)))
    with pytest.raises(MillraceError) as told:
        async with asyncio.timeout(HANGS):
            await waiting
    assert not isinstance(told.value, WorkerLost), f"{told.value!r}, events {remote.events}"


async def test_all_waits_for_a_place_together_are_as_long_as_patience(world: World) -> None:
    """It waits, is placed, gives way, and waits: what is over is over, but for a moment to ask once more."""
    world.add("m0", Role.MIXED)
    worker, patience = world.workers["m0"], world.fleet.config.patience
    worker.script.before_first, worker.script.open = [HANG], [NoRoom("full")]
    let_pass = passing_time()
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    await passed(world, let_pass, patience - 10.0)
    world.fleet.notify()
    lease = await prefilling(world, "m0")
    await passed(world, let_pass, 60.0)  # in its place
    worker.script.open = [NoRoom("full")] * 1000
    gives_way(world, "m0", lease)
    await world.settled()
    await passed(world, let_pass, 9.0)
    assert not running.done()
    await passed(world, let_pass, 2.0)
    with pytest.raises(Overloaded, match=f"no worker had room within {patience:g} s"):
        await asyncio.wait_for(running, HANGS)


async def passed(world: World, let_pass: Callable[[float], None], seconds: float) -> None:
    """On all clocks."""
    world.now += seconds
    let_pass(seconds)
    await world.settled()
