"""Tries that break one after the other are further and further apart: a request outlasts a storm, not its deadline."""

from __future__ import annotations

import asyncio

import pytest

from serving.errors import CorruptChunk, MillraceError, WorkerLost
from serving.messages import Role
from tests.router.conftest import World, expected, wanted


async def test_a_request_whose_tries_break_again_and_again_outlasts_a_storm() -> None:
    """Every way breaks for a while: eight tries at once would be over before it is."""
    world = World(retry_pause=0.02)
    for name in ("p0", "p1"):
        world.add(name, Role.PREFILL).script.before_first = [WorkerLost("reset")] * 100
    world.add("d", Role.DECODE)
    running = asyncio.create_task(world.tokens(wanted()))
    loop = asyncio.get_running_loop()
    calm_at = loop.time() + 0.3
    while not running.done():
        if loop.time() > calm_at:
            for name in ("p0", "p1"):
                world.workers[name].script.before_first.clear()
        world.beat()
        await asyncio.sleep(0.001)
    assert await running == expected(wanted())
    await world.fleet.close()


async def test_no_backing_off_takes_a_request_past_its_deadline() -> None:
    world = World(retry_pause=10_000.0)
    for name in ("p0", "p1"):
        world.add(name, Role.PREFILL).script.before_first = [CorruptChunk("x")]
    world.add("d", Role.DECODE)
    async with asyncio.timeout(60):  # by the clock, which stands still, the deadline does not pass
        assert await world.tokens(wanted(deadline=world.now + 0.5)) == expected(wanted())
    await world.fleet.close()


async def test_clients_that_leave_while_their_retries_wait_cost_later_ones_nothing() -> None:
    """Hundreds that hang up in a storm would else make those after them wait for minutes, or be refused."""
    world = World(retries_per_second=0.5, retries_saved=1.0)
    world.add("p", Role.PREFILL).script.before_first = [CorruptChunk("x")] * 40
    world.add("d", Role.DECODE)
    running = [asyncio.create_task(world.tokens(wanted(str(number)))) for number in range(2)]
    while world.router.retries.balance > -0.5:
        world.beat()
        await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert world.router.retries.balance >= 0.0 and world.held() == {}
    await world.fleet.close()


async def test_retries_beyond_the_budget_wait_and_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure costs nothing; of the next three one is saved up, the others come at 20 a second."""
    world = World(retries_per_second=20.0, retries_saved=1.0)
    for name in ("p0", "p1"):
        world.add(name, Role.PREFILL).script.before_first = [CorruptChunk("x")] * 2
    world.add("d", Role.DECODE)
    pauses, retry = list[float](), world.router.retries.retry

    def asked(now: float) -> float:
        pauses.append(retry(now))
        return pauses[-1]

    monkeypatch.setattr(world.router.retries, "retry", asked)
    began = asyncio.get_running_loop().time()
    running = asyncio.create_task(world.tokens(wanted()))
    while not running.done():
        world.beat()
        await asyncio.sleep(0.001)
    assert await running == expected(wanted())
    assert pauses == pytest.approx([0.0, 0.05, 0.1]), "the clock stands still"
    assert asyncio.get_running_loop().time() - began >= 0.15, "and it waits as long as it is told to"
    await world.fleet.close()


async def test_a_retry_whose_turn_comes_after_the_deadline_ends_at_once() -> None:
    world = World(retries_per_second=0.001, retries_saved=0.5)
    for name in ("p0", "p1"):
        world.add(name, Role.PREFILL).script.before_first = [CorruptChunk("x")] * 6
    world.add("d", Role.DECODE)
    with pytest.raises(MillraceError) as ended:
        async with asyncio.timeout(60):  # its turn would come after 500 s
            await world.tokens(wanted(deadline=world.now + 3))
    assert ended.value.status in (503, 504) and world.held() == {}
    await world.fleet.close()
