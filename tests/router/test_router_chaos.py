"""Random failures at random points, many requests at once, and clients that leave at every possible moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.quarantine import _Lost
from serving.errors import (
    IN_STEP,
    CorruptChunk,
    Draining,
    MillraceError,
    NoRoom,
    Preempted,
    StaleLease,
    Unavailable,
    WorkerLost,
)
from serving.messages import Role
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import LOSE, ScriptedWorker, Step

ROLES = (
    (Role.MIXED,),
    (Role.MIXED, Role.MIXED),
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.MIXED, Role.PREFILL, Role.DECODE),
)


def failures(choice: random.Random, chance: float, *kinds: type[MillraceError]) -> list[Step]:
    """A script that goes wrong with this chance at each of its next calls, and then no more."""
    return [choice.choice(kinds)("scripted") if choice.random() < chance else None for _ in range(12)]


def spoil(worker: ScriptedWorker, choice: random.Random, chance: float, *more: type[MillraceError]) -> None:
    script = worker.script
    script.connect = failures(choice, chance, WorkerLost)
    script.open = failures(choice, chance, NoRoom, Draining, *more)
    script.advance = failures(choice, chance, NoRoom, Draining, StaleLease)
    for point in ("before_first", "after_first", "committed"):
        setattr(script, point, failures(choice, chance, NoRoom, Draining, CorruptChunk, StaleLease, *more))
    ways: list[Step] = [LOSE, Preempted("x"), Draining("x"), WorkerLost("x"), None]
    script.decode = [(choice.randrange(6), choice.choice(ways)) for _ in range(6)]
    script.decode = [(after, how) if how is not None else (-1, None) for after, how in script.decode]


async def run_all(world: World, choice: random.Random, count: int, leaving: float) -> list[object]:
    """Requests at random times; some clients leave. Workers report each turn, as they do each second."""
    requests = [
        wanted(str(n), max_tokens=choice.randrange(1, 12), prompt=choice.choices(range(5), k=3)) for n in range(count)
    ]
    running: list[asyncio.Task[list[int]]] = []
    while len(running) < count or not all(task.done() for task in running):
        if len(running) < count and choice.random() < 0.3:
            running.append(asyncio.create_task(world.tokens(requests[len(running)])))
        for task in running:
            if not task.done() and choice.random() < leaving:
                task.cancel()
        world.beat()
        await asyncio.sleep(0)
    results = await asyncio.gather(*running, return_exceptions=True)
    for request, result in zip(requests, results, strict=True):
        assert result == expected(request) or isinstance(result, asyncio.CancelledError | Unavailable), result
    return list(results)


@pytest.mark.parametrize("more", [(), (WorkerLost,)], ids=["no call breaks", "calls break"])
@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    roles=st.sampled_from(ROLES),
    chance=st.sampled_from([0.0, 0.1, 0.4]),
    leaving=st.sampled_from([0.0, 0.01]),
)
def test_random_failures_change_no_token_and_leave_nothing(
    more: tuple[type[MillraceError], ...], seed: int, roles: tuple[Role, ...], chance: float, leaving: float
) -> None:
    async def play() -> None:
        choice = random.Random(seed)
        world = World(max_failures=200)
        for number, role in enumerate(roles):
            spoil(world.add(f"w{number}", role), choice, chance, *more)
        results = await run_all(world, choice, 6, leaving)
        if not leaving:
            assert not [result for result in results if isinstance(result, BaseException)]
        await world.settled()
        assert world.held() == {}
        world.check_cancelled_once()
        names = [name for name, *_ in world.seen.endings]
        assert len(set(names)) == len(names) and (leaving or len(names) == 6), "each request ends once"
        await world.fleet.close()

    asyncio.run(play())


Spoil = Callable[[World], None]


def nothing(world: World) -> None:
    """All goes well."""


def bad_prefill(world: World) -> None:
    world.workers["p0"].script.before_first = [WorkerLost("x")]
    world.workers["p1"].script.after_first = [CorruptChunk("x")]


def bad_decode(world: World) -> None:
    world.workers["d0"].script.open = [NoRoom("x")]
    world.workers["d1"].script.decode = [(2, LOSE)]
    world.workers["d0"].script.decode = [(1, Preempted("x"))]


def full(world: World) -> None:
    """It waits in the queue, and is asked for again."""
    for name in ("d0", "d1"):
        world.workers[name].script.open = [NoRoom("x")] * 4


def no_prefill(world: World) -> None:
    """The lease it has waits for a worker that prefills."""
    for name in ("p0", "p1"):
        world.workers[name].script.before_first = [Draining("x")] * 2


def deadly(world: World) -> None:
    """It is held back, and tried alone: another request was lost with the same workers."""
    lost: list[Step] = [WorkerLost("x", code=IN_STEP)]
    world.workers["p0"].script.before_first, world.workers["p1"].script.before_first = lost[:], lost[:]
    for name in ("p0-life", "p1-life"):
        known = _Lost(told=2, suspects={"another"})
        world.router.isolation.quarantine._lost[name] = known


async def turns_of_a_run(spoil: Spoil, stop_after: int | None, insistent: bool = False) -> tuple[World, int]:
    """One request, cancelled after so many turns of the event loop, once or at every turn; how many turns it took."""
    world = World()
    for number in range(2):
        world.add(f"p{number}", Role.PREFILL)
        world.add(f"d{number}", Role.DECODE)
    spoil(world)
    running = asyncio.create_task(world.tokens(wanted(max_tokens=6)))
    turns = 0
    while not running.done():
        if turns == stop_after or (insistent and stop_after is not None and turns > stop_after):
            running.cancel()
        world.beat()
        await asyncio.sleep(0)
        turns += 1
    if stop_after is None:
        assert running.result() == expected(wanted(max_tokens=6))
    await asyncio.gather(running, return_exceptions=True)
    await world.settled()
    return world, turns


@pytest.mark.parametrize("insistent", [False, True], ids=["once", "at every turn"])
@pytest.mark.parametrize("spoil", [nothing, bad_prefill, bad_decode, full, no_prefill, deadly])
async def test_a_client_may_leave_at_any_moment(spoil: Spoil, insistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task group that is cancelled cancels its tasks again and again until they end."""
    monkeypatch.setattr("router.isolation.SETTLE_SECONDS", 0.0)
    world, turns = await turns_of_a_run(spoil, None)
    assert world.held() == {} and turns > 15
    for stop_after in range(turns + 1):
        world, _ = await turns_of_a_run(spoil, stop_after, insistent)
        assert world.held() == {}, f"left after {stop_after} turns"
        world.check_cancelled_once()
        assert len(world.seen.endings) == (0 if stop_after == 0 else 1)
        await world.fleet.close()
