"""The admission queue: who looks for a place and when, against a room of so many places."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import CONTINUATION, AdmissionQueue, Claim, Ticket
from router.changes import Changes
from serving.errors import Overloaded
from serving.fair_shares import FairShares

NEW = 0
HANG = "hang"  # a kind whose look never ends
NEVER = "never"  # a kind there is no place for


class Room:
    """`places` for requests that enter through the queue; each stays until it is told to leave."""

    def __init__(self, places: int, max_waiting: int = 100):
        self.places = places
        self.inside: list[str] = []
        self.entered: list[str] = []
        self.looks: list[str] = []
        self.changes = Changes()
        self.queue = AdmissionQueue(max_waiting, self.changes)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leave: dict[str, asyncio.Event] = {}

    async def come(
        self, name: str, priority: int = NEW, *, tenant: str = "", tokens: int = 1, kind: object = None
    ) -> None:
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._pass(name, Claim(priority, tenant, tokens, kind)))
        await settle()

    async def _pass(self, name: str, claim: Claim) -> None:
        async with self.queue.enter(claim) as ticket:
            while True:
                await self.queue.turn(ticket)
                self.looks.append(name)
                if claim.kind == HANG:
                    await asyncio.Event().wait()
                found = claim.kind != NEVER and len(self.inside) < self.places
                await asyncio.sleep(0)
                found = found and len(self.inside) < self.places
                if found:
                    self.inside.append(name)
                self.queue.looked(ticket, found=found)
                if found:
                    break
        self.entered.append(name)
        try:
            await self.leave[name].wait()
        finally:
            self.inside.remove(name)
            self.changes.notify()

    async def go(self, name: str) -> None:
        self.leave[name].set()
        await settle()

    async def empty(self) -> None:
        """Let everyone in and out until no one can enter any more."""
        while self.inside:
            await self.go(self.inside[0])

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def test_requests_go_by_priority_then_in_order_of_arrival_and_continuations_first() -> None:
    room = Room(1)
    for name, priority in (("a", NEW), ("b", 100), ("c", NEW), ("d", CONTINUATION), ("e", -100), ("f", NEW)):
        await room.come(name, priority)
    assert room.inside == ["a"] and room.queue.waiting == 5
    await room.empty()
    assert room.entered == ["a", "d", "e", "c", "f", "b"] and room.queue.waiting == 0


def pumps() -> int:
    return sum(task.get_name() == "admission" for task in asyncio.all_tasks())


async def test_a_request_that_is_alone_and_finds_room_begins_no_task() -> None:
    room = Room(1)
    for name in "abc":
        await room.come(name)
        assert room.inside == [name] and pumps() == 0
        await room.go(name)
    await room.come("inside")
    await room.come("waits")
    assert pumps() == 1
    await room.close()


@pytest.mark.parametrize("others", [0, 1])
async def test_what_changes_while_one_looks_alone_is_not_missed(others: int) -> None:
    """Nobody waits for the change then: it looks again at once."""
    room = Room(0)
    room.leave["a"] = asyncio.Event()
    room.tasks["a"] = asyncio.create_task(room._pass("a", Claim(NEW, "", 1)))
    while not room.looks:
        await asyncio.sleep(0)
    room.changes.notify()  # the look under way does not see the place
    for name in "bc"[:others]:
        await room.come(name, kind=NEVER)
    await settle()
    assert room.looks.count("a") == 2
    await room.close()


async def test_places_are_looked_for_side_by_side() -> None:
    """Requests that find their places do not wait for each other's look."""
    room = Room(10)
    for n in range(10):
        room.leave[str(n)] = asyncio.Event()
        room.tasks[str(n)] = asyncio.create_task(room._pass(str(n), Claim(NEW, "", 1)))
    await settle()
    assert len(room.entered) == 10
    await room.empty()


async def test_one_that_finds_no_place_keeps_back_only_those_that_ask_for_as_much() -> None:
    room = Room(1)
    await room.come("inside")
    await room.come("large", tokens=100)
    looks = len(room.looks)
    await room.come("larger", tokens=200)
    assert len(room.looks) == looks, "it asks for more than was not to be had"
    await room.come("small", tokens=10)
    await room.come("other", tokens=200, kind="other")
    assert room.looks[looks:] == ["small", "other"]
    await room.close()


async def test_one_that_can_never_go_blocks_no_one() -> None:
    room = Room(2)
    await room.come("never", CONTINUATION, kind=NEVER)
    for name in "abcd":
        await room.come(name)
    assert room.inside == ["a", "b"]
    await room.empty()
    assert room.entered == ["a", "b", "c", "d"] and room.queue.waiting == 1
    await room.close()
    assert room.queue.waiting == 0


async def test_a_worker_that_does_not_answer_holds_up_one_request() -> None:
    room = Room(2)
    await room.come("hangs", CONTINUATION, kind=HANG)
    await room.come("a")
    async with asyncio.timeout(60):
        while "a" not in room.entered:
            await asyncio.sleep(0.005)
    room.changes.notify()
    await room.come("b")
    async with asyncio.timeout(60):
        while "b" not in room.entered:
            await asyncio.sleep(0.005)
    assert room.looks.count("hangs") == 1, "it is still looking"
    await room.close()


async def test_while_there_is_no_room_one_looks_for_all() -> None:
    """A change costs a look or two, however many wait."""
    room = Room(1)
    for n in range(200):
        await room.come(str(n), tokens=1)
    looks = len(room.looks)
    for _ in range(10):
        room.changes.notify()
        await settle()
    assert len(room.looks) - looks == 10
    await room.close()


async def test_tenants_share_what_there_is_by_tokens() -> None:
    room = Room(1)
    await room.come("first", tenant="x")
    for n in range(6):
        await room.come(f"greedy{n}", tenant="greedy", tokens=100)
    for n in range(4):
        await room.come(f"modest{n}", tenant="modest", tokens=100)
    await room.empty()
    served = [name[:6] for name in room.entered[1:9]]
    assert served.count("greedy") == served.count("modest") == 4
    assert [name for name in room.entered if name.startswith("greedy")] == [f"greedy{n}" for n in range(6)]


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    shares = FairShares()
    shares.arrived("busy", set())
    shares.charge("busy", 10_000)
    shares.arrived("back", {"busy"})
    assert shares.served("back") == 10_000


def test_a_tenant_that_comes_while_nobody_waits_is_owed_nothing() -> None:
    shares = FairShares()
    for _ in range(1000):
        shares.arrived("old", set())
        shares.charge("old", 1000)
    shares.arrived("new", set())
    assert shares.served("old") - shares.served("new") == 1000, "the old one's last request, and no more"


def test_tenants_without_number_take_bounded_memory() -> None:
    shares = FairShares()
    for n in range(20_000):
        shares.arrived(str(n), set())
    assert len(shares._served) <= 4096


class Claimed:
    """Claims that look when they are told to, and find a place or none."""

    def __init__(self) -> None:
        self.queue = AdmissionQueue(1000, Changes())
        self.stack = AsyncExitStack()

    async def come(self, tokens: int, *, tenant: str = "", priority: int = NEW, kind: object = None) -> Ticket:
        return await self.stack.enter_async_context(self.queue.enter(Claim(priority, tenant, tokens, kind)))


async def test_overtaken_is_who_came_first_is_larger_and_had_no_less_than_its_share() -> None:
    claims = Claimed()
    async with claims.stack:
        large = await claims.come(10, tenant="x")
        claims.queue.looked(await claims.come(1, tenant="x"), found=True)
        assert large.overtaken == 0, "it has not looked yet"
        claims.queue.looked(large, found=False)
        claims.queue.looked(await claims.come(1, tenant="x"), found=True)
        assert large.overtaken == 1
        for others in ({"kind": "other"}, {"priority": -1}, {"tokens": 10}):
            claims.queue.looked(await claims.come(**{"tokens": 1, "tenant": "x", **others}), found=True)
        claims.queue.looked(await claims.come(1, tenant="x"), found=False)
        assert large.overtaken == 1
        fresh = await claims.come(1, tenant="fresh")
        claims.queue.shares.charge("x", 100)
        claims.queue.looked(fresh, found=True)
        assert large.overtaken == 1, "it was the other tenant's turn"
        claims.queue.shares.charge("fresh", 1000)
        claims.queue.looked(await claims.come(1, tenant="fresh"), found=True)
        assert large.overtaken == 2


async def test_who_leaves_the_queue_is_passed_over() -> None:
    room = Room(1)
    for name in "abcd":
        await room.come(name)
    room.tasks["b"].cancel()
    await settle()
    assert room.queue.waiting == 2
    await room.empty()
    assert room.entered == ["a", "c", "d"]


async def test_an_error_while_looking_gives_the_turn_away() -> None:
    room = Room(1)
    with pytest.raises(ZeroDivisionError):
        async with room.queue.enter(Claim(NEW, "", 1)) as ticket:
            await room.queue.turn(ticket)
            raise ZeroDivisionError
    await room.come("a")
    assert room.inside == ["a"] and room.queue.waiting == 0
    await room.empty()


@pytest.mark.parametrize("max_waiting", [0, 1, 3])
async def test_too_many_are_refused_at_once_but_never_a_continuation(max_waiting: int) -> None:
    room = Room(1, max_waiting)
    await room.come("inside")
    for number in range(max_waiting + 1):
        await room.come(str(number))
    with pytest.raises(Overloaded) as refused:
        async with room.queue.enter(Claim(NEW, "", 1)):
            raise AssertionError("it is let in")
    assert refused.value.code == "queue_full" and refused.value.retry_after
    await room.come("again", CONTINUATION)
    await room.empty()
    assert set(room.entered) == {"inside", *map(str, range(max_waiting + 1)), "again"}


async def test_waiting_requests_survive_a_change_that_breaks() -> None:
    """The task that lets requests look is replaced when it breaks."""
    room = Room(1)
    broken = [True]

    async def changed() -> None:
        if broken and broken.pop():
            raise ZeroDivisionError
        await room.changed()

    room.queue.changed = changed
    await room.come("a")
    await room.come("b")
    await room.empty()
    assert room.entered == ["a", "b"]


async def test_who_comes_as_the_queue_breaks_begins_no_second_task_of_it() -> None:
    """Of two only one would be told that there is something to look at."""
    broken = [True]

    class Breaking(Changes):
        async def next(self) -> None:
            if broken and broken.pop():
                raise ZeroDivisionError
            await super().next()

    queue = AdmissionQueue(5, Breaking())
    async with asyncio.timeout(60), queue.enter(Claim(0, "", 1)) as first:
        await queue.turn(first)
        queue.looked(first, found=False)
        while queue._pump is None or not queue._pump.done():
            await asyncio.sleep(0)
        async with queue.enter(Claim(0, "", 1)):
            for _ in range(5):
                await asyncio.sleep(0)
            assert sum(task.get_name() == "admission" for task in asyncio.all_tasks()) == 1
    while queue._pump is not None and not queue._pump.done():
        await asyncio.sleep(0)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_of_coming_going_and_leaving_lets_everyone_else_through(seed: int) -> None:
    async def play() -> None:
        choice = random.Random(seed)
        room = Room(choice.choice([1, 2, 5]))
        claims: dict[str, int] = {}
        cancelled: set[str] = set()
        for number in range(25):
            what = choice.random()
            if what < 0.5:
                name = f"{number:02}"
                claims[name] = choice.choice((NEW, CONTINUATION, 100))
                await room.come(name, claims[name], tenant=choice.choice("xy"), tokens=choice.choice((1, 50)))
            elif what < 0.75 and room.inside:
                room.leave[room.inside[0]].set()
            elif claims:
                name = choice.choice(list(claims))
                room.tasks[name].cancel()
                cancelled.add(name)
            for _ in range(choice.randrange(4)):
                await asyncio.sleep(0)
            assert len(room.inside) <= room.places
        await settle()
        await room.empty()
        await settle()
        await room.empty()
        assert set(claims) - cancelled <= set(room.entered), "one was never let in"
        assert len(set(room.entered)) == len(room.entered) and room.queue.waiting == 0
        await room.close()

    asyncio.run(play())


async def test_the_tokens_that_wait_are_those_of_the_requests_that_wait() -> None:
    room = Room(0)
    async with room.queue.enter(Claim(NEW, "", 30)), room.queue.enter(Claim(CONTINUATION, "", 5)):
        assert (room.queue.waiting, room.queue.waiting_tokens) == (2, 35)
    assert room.queue.waiting_tokens == 0
