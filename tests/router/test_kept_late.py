"""Workers kept for large requests that are late, and those that are pressing beside them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.candidate import Candidate
from router.lease_room import MOST_OVERTAKEN, KeptWorkers
from router.request_state import RequestState
from serving.messages import Slo
from serving.timeline import Moment
from tests.router.conftest import World, wanted
from tests.router.scripted import make_status
from tests.router.test_overtaking import ROOM, TightWorker


def state(name: str, ttft_ms: float | None, priority: int = 0) -> RequestState:
    made = RequestState(request=replace(wanted(name), slo=Slo(ttft_ms=ttft_ms), priority=priority))
    made.timeline.note(Moment.ARRIVED, 0.0)
    return made


def one() -> list[Candidate]:
    return [Candidate(make_status("a", free_blocks=5))]


def test_what_is_kept_for_a_more_important_late_one_less_important_pressing_ones_do_not_take() -> None:
    kept, workers = KeptWorkers(), one()
    kept.keep(state("late", 1.0), workers)
    assert kept.bars("a-life", state("small", 60_000.0, priority=50), 1.0)


def test_a_late_one_that_has_waited_longer_than_leases_give_way_has_its_worker() -> None:
    kept, workers = KeptWorkers(), one()
    kept.keep(state("late", 1.0), workers)
    assert kept.bars("a-life", state("small", 600_000.0), 100.0), "decode.giving_way.LONGEST is 30 s"


@pytest.mark.parametrize("priority", [0, 50])
async def test_a_large_late_one_finds_room_beside_small_ones_in_time(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    monkeypatch.setattr("tests.router.conftest.ScriptedWorker", TightWorker)
    world, arrived = World(patience=60.0), list[asyncio.Task[list[int]]]()
    worker = world.add("a", max_seqs=100)

    def come(name: str, prompt: tuple[int, ...], ttft_ms: float, priority: int) -> None:
        slo, tokens = Slo(ttft_ms=ttft_ms), 10 + 7 * (len(arrived) % 10)
        request = wanted(name, prompt=prompt, max_tokens=tokens, slo=slo, priority=priority)
        arrived.append(asyncio.create_task(world.tokens(request)))

    for number in range(ROOM // 2):
        come(f"first{number}", (1, 2), 600_000.0, priority)
    while len(worker.leases()) < ROOM // 2:
        await asyncio.sleep(0)
    come("large", (1,) * ROOM, 1.0, 0)
    await asyncio.sleep(0)
    world.now += 1.0
    large, number = arrived[-1], 0
    while not large.done() and number < 40 * MOST_OVERTAKEN:
        while sum(not task.done() for task in arrived) < 20:
            come(f"small{number}", (1, 2), 600_000.0, priority)
            number += 1
        await asyncio.sleep(0)
        world.now += 0.1
    done, at = large.done(), world.now
    await asyncio.wait_for(asyncio.gather(*arrived, return_exceptions=True), 60)
    await world.fleet.close()
    assert done, f"it would wait for ever: {at:.0f} s, {number} small ones went before it"
