"""Who keeps whom back where workers end late leases for some requests and not for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.lease_room import MOST_OVERTAKEN
from serving.errors import NoRoom, WorkerLost
from serving.messages import LeaseGrant, LeaseOrder, Slo
from tests.fakes.loop_time import passing_time
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG, ScriptedSession

pytestmark = pytest.mark.usefixtures("ties_by_name", "looks_by_hand")
LATE_MS, TTFT_MS = 1.0, 60_000.0
HANGS = 30.0  # seconds
Refuses = Callable[[LeaseOrder], bool]
OF_LEASES = 0  # the priority of the late leases that fill the workers


def gains_nothing(order: LeaseOrder) -> bool:
    """A full worker's late leases do not give way to it (decode.giving_way)."""
    left = order.first_token_in
    return left is None or not left > 0.0 or order.request.priority > OF_LEASES


def refusing(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    async def open_(self: ScriptedSession, order: LeaseOrder) -> LeaseGrant:
        await asyncio.sleep(0)
        self.worker.opened[order.lease.lease] += 1
        if refuses(order):
            raise NoRoom("full")
        return self._enter(order)

    monkeypatch.setattr(ScriptedSession, "open", open_)


async def asked_in_vain(world: World, *tasks: asyncio.Task[list[int]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.settled()


NO_OBJECTIVE, LESS_IMPORTANT = {"slo": Slo()}, {"slo": Slo(ttft_ms=TTFT_MS), "priority": 50}


@pytest.mark.parametrize(
    "fields, workers",
    [
        pytest.param(NO_OBJECTIVE, 1, id="no objective"),
        pytest.param(LESS_IMPORTANT, 1, id="less important"),
        pytest.param(NO_OBJECTIVE, 12, id="no objective, many workers"),
        pytest.param(LESS_IMPORTANT, 12, id="less important, many workers"),
    ],
)
async def test_one_that_nobody_gives_way_to_keeps_no_one_back_whom_they_would(
    world: World, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], workers: int
) -> None:
    refusing(monkeypatch, gains_nothing)
    for number in range(workers):
        world.add(f"m{number:02}")
    first = asyncio.create_task(world.tokens(wanted("first", **fields)))
    for _ in range(4 if workers > 1 else 0):
        await world.settled()
        world.fleet.notify()
    await world.settled()
    assert world.placer.admission.waiting == 1
    try:
        async with asyncio.timeout(HANGS):
            request = wanted("in-time", slo=Slo(ttft_ms=TTFT_MS))
            assert await world.tokens(request) == expected(request)
    finally:
        await asked_in_vain(world, first)


async def test_no_worker_is_kept_from_those_in_time_for_one_that_is_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, gains_nothing)
    world.add("m0")
    late = asyncio.create_task(world.tokens(wanted("late", prompt=range(9), slo=Slo(ttft_ms=LATE_MS))))
    await asyncio.sleep(0)
    world.now += 1.0
    await world.settled()
    try:
        for number in range(MOST_OVERTAKEN + 3):
            request = wanted(f"in-time-{number}", slo=Slo(ttft_ms=TTFT_MS))
            async with asyncio.timeout(HANGS):
                assert await world.tokens(request) == expected(request), number
            world.fleet.notify()
            await world.settled()
    finally:
        await asked_in_vain(world, late)


async def test_a_crowd_that_has_become_late_while_it_waited_asks_once_for_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One late refusal says what the others would hear: those in time come last and wait for all looks."""
    full = [True]
    refusing(monkeypatch, lambda order: full[0] or gains_nothing(order))
    worker = world.add("m0")
    crowd = [asyncio.create_task(world.tokens(wanted(f"r{n}", slo=Slo(ttft_ms=1000.0)))) for n in range(100)]
    await world.settled()
    before = sum(worker.opened.values())
    world.now += 2.0  # all are late
    full[0] = False
    in_time = asyncio.create_task(world.tokens(wanted("in-time", slo=Slo(ttft_ms=TTFT_MS))))
    world.fleet.notify()
    try:
        async with asyncio.timeout(HANGS):
            await in_time
    finally:
        looks = sum(worker.opened.values()) - before
        await asked_in_vain(world, *crowd, in_time)
    assert looks <= 10, looks


async def test_a_request_that_waited_long_waits_for_its_worker_to_come_back(world: World) -> None:
    """Its worker dies with its prompt, and another life of it is there 3 s later: patience for a place is 5 s."""
    worker, patience = world.add("m0"), world.fleet.config.patience
    worker.script.open, worker.script.before_first = [NoRoom("full")], [HANG]
    let_pass = passing_time()
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    await passed(world, let_pass, patience - 0.5)
    world.fleet.notify()
    while not worker.runs:
        await asyncio.sleep(0)
    world.fleet.suspect(worker.status.instance, WorkerLost("gone"))
    worker.closing.set()
    await world.settled()
    await passed(world, let_pass, 3.0)
    world.add("m0", instance="m0-second")
    await world.settled()
    try:
        async with asyncio.timeout(HANGS):
            assert await running == expected(wanted())
    finally:
        await asked_in_vain(world, running)


async def passed(world: World, let_pass: Callable[[float], None], seconds: float) -> None:
    world.now += seconds
    let_pass(seconds)
    await world.settled()
