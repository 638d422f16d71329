"""The admission: one looks at a time, continuations first, then in order of arrival; whoever leaves holds nobody up."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import CONTINUATION, NEW, AdmissionQueue
from serving.errors import Overloaded


class Crowd:
    """Tasks that go through a admission, each when it is told to leave."""

    def __init__(self, max_waiting: int = 100):
        self.admission = AdmissionQueue(max_waiting)
        self.entered: list[str] = []
        self.inside: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, priority: int = NEW) -> None:
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._pass(name, priority))
        await asyncio.sleep(0)

    async def _pass(self, name: str, priority: int) -> None:
        async with self.admission.turn(priority):
            self.inside.append(name)
            assert len(self.inside) == 1, "two look for a place at once"
            self.entered.append(name)
            try:
                await self.leave[name].wait()
            finally:
                self.inside.remove(name)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def pass_all(self) -> None:
        while self.inside:
            self.leave[self.inside[0]].set()
            await self.settle()


async def test_new_requests_go_in_order_and_after_continuations() -> None:
    crowd = Crowd()
    for name, priority in (("a", NEW), ("b", NEW), ("c", CONTINUATION), ("d", NEW), ("e", CONTINUATION)):
        await crowd.come(name, priority)
    assert crowd.admission.waiting == 5
    await crowd.pass_all()
    assert crowd.entered == ["a", "c", "e", "b", "d"] and crowd.admission.waiting == 0


async def test_who_leaves_the_queue_is_passed_over() -> None:
    crowd = Crowd()
    for name in "abcd":
        await crowd.come(name)
    crowd.tasks["b"].cancel()
    await crowd.settle()
    assert crowd.admission.waiting == 3
    await crowd.pass_all()
    assert crowd.entered == ["a", "c", "d"]


async def test_who_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    crowd = Crowd()
    for name in "abc":
        await crowd.come(name)
    crowd.leave["a"].set()
    await asyncio.sleep(0)  # a leaves, b's turn has come but b has not heard of it yet
    crowd.tasks["b"].cancel()
    await crowd.pass_all()
    await crowd.settle()
    assert crowd.entered == ["a", "c"]
    await crowd.pass_all()
    assert crowd.admission.waiting == 0


async def test_who_is_cancelled_while_looking_gives_the_turn_away() -> None:
    crowd = Crowd()
    await crowd.come("a")
    await crowd.come("b")
    crowd.tasks["a"].cancel()
    await crowd.settle()
    assert crowd.inside == ["b"]
    await crowd.pass_all()


async def test_an_error_while_looking_gives_the_turn_away() -> None:
    admission = AdmissionQueue(9)
    with pytest.raises(ZeroDivisionError):
        async with admission.turn(NEW):
            raise ZeroDivisionError
    async with admission.turn(NEW):
        assert admission.waiting == 1
    assert admission.waiting == 0


@pytest.mark.parametrize("max_waiting", [0, 1, 3])
async def test_too_many_are_refused_at_once_but_never_a_continuation(max_waiting: int) -> None:
    crowd = Crowd(max_waiting)
    for number in range(max_waiting + 1):  # one looks, the others wait
        await crowd.come(str(number))
    with pytest.raises(Overloaded) as refused:
        async with crowd.admission.turn(NEW):
            raise AssertionError("nobody gets here")
    assert refused.value.code == "queue_full" and refused.value.retry_after
    await crowd.come("again", CONTINUATION)
    await crowd.pass_all()
    assert set(crowd.entered) == {*map(str, range(max_waiting + 1)), "again"}


async def test_who_has_left_does_not_count_as_waiting() -> None:
    crowd = Crowd(1)
    await crowd.come("a")
    await crowd.come("b")
    crowd.tasks["b"].cancel()
    await crowd.settle()
    await crowd.come("c")
    await crowd.pass_all()
    assert crowd.entered == ["a", "c"]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_of_coming_going_and_leaving_lets_everyone_else_through(seed: int) -> None:
    async def play() -> None:
        choice = random.Random(seed)
        crowd = Crowd()
        priority: dict[str, int] = {}
        order: list[str] = []
        cancelled: set[str] = set()
        for number in range(25):
            what = choice.random()
            if what < 0.5:
                name = f"{number:02}"
                priority[name] = choice.choice((NEW, CONTINUATION))
                waiting = [n for n in order if n not in crowd.entered and n not in cancelled]
                order.append(name)
                await crowd.come(name, priority[name])
                assert crowd.admission.waiting <= len(waiting) + 2
            elif what < 0.75 and crowd.inside:
                crowd.leave[crowd.inside[0]].set()
            elif order:
                name = choice.choice(order)
                crowd.tasks[name].cancel()
                cancelled.add(name)
            for _ in range(choice.randrange(4)):
                await asyncio.sleep(0)
        await crowd.settle()
        await crowd.pass_all()
        assert set(order) - cancelled <= set(crowd.entered), "somebody was never let in"
        assert len(set(crowd.entered)) == len(crowd.entered) and crowd.admission.waiting == 0
        for kind in (NEW, CONTINUATION):
            came = [name for name in order if priority[name] == kind and name in crowd.entered]
            assert [name for name in crowd.entered if priority[name] == kind] == came
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)

    asyncio.run(play())
