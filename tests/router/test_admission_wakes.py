"""Nobody waits in the admission queue while there is a place for it, whenever looks begin and end and places come free.

What the queue waits for here never ends by itself: a change that nobody sees is never seen.
"""

from __future__ import annotations

import asyncio
import random
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router import admission
from router.admission import AdmissionQueue, Claim
from router.changes import Changes

TURNS = 600  # of the event loop, in which whoever can go has gone


class Places:
    """So many places for requests whose looks and stays take turns of the event loop."""

    def __init__(self, free: int):
        self.free = free
        self.changes = Changes()
        self.queue = AdmissionQueue(1000, self.changes)

    async def passes(self, claim: Claim, look: int, stay: int, *, fails: bool = False) -> None:
        """A request that looks until it has found a place, and leaves it again; or that `fails` as it looks."""
        async with self.queue.enter(claim) as ticket:
            found: bool | None = False
            while not found:
                await self.queue.turn(ticket)
                found, free = None, self.free
                try:
                    await turns(look)
                    if fails:
                        raise ZeroDivisionError
                    found = min(free, self.free) > 0  # what was seen as it began counts
                finally:
                    self.queue.looked(ticket, found=found)
            self.free -= 1
        try:
            await turns(stay)
        finally:
            self.free += 1
            self.changes.notify()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_place_that_comes_free_right_after_a_look_is_seen() -> None:
    places = Places(0)
    coming = asyncio.create_task(places.passes(Claim(0, "", 1), 0, 0))
    await turns(1)
    assert places.queue.waiting == 1, "it has looked, and nobody waits for a change yet"
    places.free = 1
    places.changes.notify()
    async with asyncio.timeout(60):
        await coming


async def test_a_look_that_began_before_a_change_keeps_nobody_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.0)
    places = Places(0)
    slow = asyncio.create_task(places.passes(Claim(0, "", 1), 40, 0))
    other = asyncio.create_task(places.passes(Claim(0, "", 2, "other"), 0, 0))
    await turns(20)
    places.free = 1
    places.changes.notify()
    async with asyncio.timeout(60):
        await asyncio.gather(slow, other)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), look_seconds=st.sampled_from((0.0, 0.02)))
@example(seed=359, look_seconds=0.02)
def test_nobody_waits_while_there_is_a_place(seed: int, look_seconds: float) -> None:
    with mock.patch.object(admission, "LOOK_SECONDS", look_seconds):
        asyncio.run(come_and_go(random.Random(seed)))


async def come_and_go(draw: random.Random) -> None:
    places, coming = Places(draw.randint(1, 3)), list[asyncio.Task[None]]()
    for _ in range(draw.randint(1, 8)):
        claim = Claim(draw.choice((0, 0, 1)), draw.choice("ab"), draw.randint(1, 3), draw.choice((None, "other")))
        look, stay = draw.choice((0, 0, 1, 2, 4)), draw.randint(0, 9)
        coming.append(asyncio.create_task(places.passes(claim, look, stay, fails=draw.random() < 0.05)))
        await turns(draw.choice((0, 0, 0, 1, 2, 3, 5, 12)))
        if draw.random() < 0.2:
            draw.choice(coming).cancel()
    spent = 0
    while not all(each.done() for each in coming) and spent < TURNS:
        await turns(1)
        spent += 1
    left = [each for each in coming if not each.done()]
    for each in left:
        each.cancel()
    await asyncio.gather(*coming, return_exceptions=True)
    assert not left, f"{len(left)} wait, and {places.free} places are free"
    await turns(3)
    pump = places.queue._pump
    assert pump is None or pump.done()
