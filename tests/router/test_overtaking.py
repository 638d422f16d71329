"""Large requests that smaller ones overtake: after so many, a worker's room is kept for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.candidate import Candidate
from router.lease_room import KEPT_SHARE, MOST_OVERTAKEN, KeptWorkers
from router.request_state import RequestState
from serving.errors import MillraceError, NoRoom
from serving.links import Deliver
from serving.messages import LeaseGrant, LeaseOrder, Slo
from tests.router.conftest import World, wanted
from tests.router.scripted import ScriptedSession, ScriptedWorker, make_status

pytestmark = pytest.mark.usefixtures("ties_by_name")

ROOM = 20  # tokens


class TightSession(ScriptedSession):
    """Its worker has room for so many tokens of prompts."""

    async def open(self, order: LeaseOrder) -> LeaseGrant:
        self.worker.opened[order.lease.lease] += 1
        await asyncio.sleep(0)
        held = sum(len(lease.order.request.prompt) for lease in self.leases.values())
        if held + len(order.request.prompt) > ROOM:
            raise NoRoom("full", code="blocks")
        cast(TightWorker, self.worker).granted.append(order.request.request_id)
        return self._enter(order)


class TightWorker(ScriptedWorker):
    """Remembers which requests have had room, in this order."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.granted: list[str] = []

    async def connect(self, router: str, deliver: Deliver, lost: Callable[[MillraceError], None]) -> ScriptedSession:
        session = TightSession(self, deliver, lost)
        self.sessions.append(session)
        return session


async def placed_beside_small_ones(
    arrived: list[asyncio.Task[list[int]]],
    come: Callable[[str, tuple[int, ...]], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Whether the request that came last ends while small ones come again and again, twenty at a time."""
    large, number = arrived[-1], 0
    while not large.done() and number < 20 * MOST_OVERTAKEN:
        while sum(not task.done() for task in arrived) < 20:
            come(f"small{number}", (1, 2))
            number += 1
        await asyncio.sleep(0)
        meanwhile()
    return large.done()


async def test_smaller_requests_overtake_a_large_one_so_many_times_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room comes free bit by bit: small ones would take all of it for ever."""
    monkeypatch.setattr("tests.router.conftest.ScriptedWorker", TightWorker)
    world = World(patience=60.0)
    world.add("a", max_seqs=100)
    arrived: list[asyncio.Task[list[int]]] = []
    worker, openings = cast(TightWorker, world.workers["a"]), world.fleet.sessions._openings
    at_keep: list[tuple[int, int]] = []  # had room, and asking for it
    keep = world.placer.room.kept.keep

    def keep_and_count(state: RequestState, able: Sequence[Candidate]) -> None:
        at_keep.append((len(worker.granted), len(openings.get(worker.status.instance, ()))))
        keep(state, able)

    monkeypatch.setattr(world.placer.room.kept, "keep", keep_and_count)

    def come(name: str, prompt: tuple[int, ...]) -> None:
        """Those that run beside each other do not all end at the same time."""
        request = wanted(name, prompt=prompt, max_tokens=10 + 7 * (len(arrived) % 10))
        arrived.append(asyncio.create_task(world.tokens(request)))

    for number in range(ROOM // 2):
        come(f"first{number}", (1, 2))
    while len(world.workers["a"].leases()) < ROOM // 2:
        await asyncio.sleep(0)
    come("large", (1,) * ROOM)
    await asyncio.sleep(0)
    assert await placed_beside_small_ones(arrived, come), "it would wait for ever"
    assert await asyncio.wait_for(asyncio.gather(*arrived), 60)
    overtook = worker.granted.index("large")
    assert at_keep[0][0] <= overtook <= sum(at_keep[0]), "once it is kept for it, no other that comes finds room"
    assert ROOM // 2 + MOST_OVERTAKEN <= overtook <= ROOM // 2 + MOST_OVERTAKEN + ROOM  # let in between two looks
    assert world.held() == {} and len(world.placer.room.kept) == 0
    await world.fleet.close()


@pytest.mark.parametrize("ttft_ms", [None, 1.0])
async def test_a_large_one_that_is_as_late_as_all_others_finds_room(
    monkeypatch: pytest.MonkeyPatch, ttft_ms: float | None
) -> None:
    monkeypatch.setattr("tests.router.conftest.ScriptedWorker", TightWorker)
    world, arrived = World(patience=60.0), list[asyncio.Task[list[int]]]()
    worker = world.add("a", max_seqs=100)

    def come(name: str, prompt: tuple[int, ...]) -> None:
        request = wanted(name, prompt=prompt, max_tokens=10 + 7 * (len(arrived) % 10), slo=Slo(ttft_ms=ttft_ms))
        arrived.append(asyncio.create_task(world.tokens(request)))

    for number in range(ROOM // 2):
        come(f"first{number}", (1, 2))
    while len(worker.leases()) < ROOM // 2:
        await asyncio.sleep(0)
    come("large", (1,) * ROOM)
    await asyncio.sleep(0)
    world.now += 1.0

    def late() -> None:
        world.now += 0.01

    done = await placed_beside_small_ones(arrived, come, late)
    assert await asyncio.wait_for(asyncio.gather(*arrived), 60)
    await world.fleet.close()
    assert done, "it would wait for ever"


def state(name: str, priority: int = 0) -> RequestState:
    return RequestState(request=replace(wanted(name), priority=priority))


def test_a_worker_is_kept_for_one_request_and_texts_that_go_on_or_matter_more_may_use_it() -> None:
    kept, large = KeptWorkers(), state("large")
    workers = [Candidate(make_status(name, free_blocks=blocks)) for name, blocks in (("a", 3), ("b", 7), ("c", 5))]
    kept.keep(large, workers)
    kept.keep(large, workers)
    assert [worker.status.name for worker in workers if kept.bars(worker.status.instance, state("small"), 0.0)] == ["b"]
    assert not kept.bars("b-life", large, 0.0) and not kept.bars("b-life", state("hurried", -1), 0.0)
    going_on = state("going on")
    going_on.generated.append(7)
    assert not kept.bars("b-life", going_on, 0.0)
    kept.keep(state("another"), workers)
    assert len(kept) == 1, f"one in {KEPT_SHARE}, or one"
    kept.keep(large, [workers[0], workers[2]])
    assert kept.bars("c-life", state("small"), 0.0) and not kept.bars("b-life", state("small"), 0.0), "b is gone"
    assert kept.release(large) and not kept.release(large) and len(kept) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 30))
def test_never_more_than_a_share_of_the_workers_is_kept(events: list[tuple[int, bool]], count: int) -> None:
    kept, workers = KeptWorkers(), [Candidate(make_status(str(number))) for number in range(count)]
    states = [state(str(number)) for number in range(10)]
    for number, comes in events:
        if comes:
            kept.keep(states[number], workers)
        else:
            kept.release(states[number])
        assert len(kept) <= max(1, count // KEPT_SHARE)
        barred = [any(kept.bars(each.status.instance, other, 0.0) for each in workers) for other in states]
        assert barred.count(False) <= 1 or not len(kept), "one that keeps a worker is barred from none but others'"
