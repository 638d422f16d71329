"""Background tasks: what breaks is told, counted and begun again; what is stopped has ended."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from serving.background import BackgroundTasks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_task_that_breaks_is_told_counted_and_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    background, runs = BackgroundTasks(first_pause=0.001), []

    async def work() -> None:
        runs.append(len(runs))
        if len(runs) < 4:
            raise ZeroDivisionError("a mistake")
        await asyncio.Event().wait()

    background.start("heartbeats", work)
    await until(lambda: len(runs) == 4)
    assert background.restarts == {"heartbeats": 3}
    assert "heartbeats broke" in caplog.text and "ZeroDivisionError: a mistake" in caplog.text
    await background.stop()
    assert len(runs) == 4


async def test_a_task_that_something_else_cancels_is_begun_again() -> None:
    background, runs = BackgroundTasks(first_pause=0.001), []

    async def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    background.start("w", work)
    await until(lambda: len(runs) == 2)
    await background.stop()


async def test_a_task_that_returns_is_done() -> None:
    background, runs = BackgroundTasks(first_pause=0.001), []

    async def work() -> None:
        runs.append(1)

    background.start("once", work)
    await until(lambda: bool(runs))
    await asyncio.sleep(0.01)
    assert len(runs) == 1 and not background.restarts
    await background.stop()


async def test_stopping_waits_for_tasks_to_clean_up() -> None:
    background, cleaned, started = BackgroundTasks(), [], asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    background.start("w", work)
    await started.wait()
    await background.stop()
    assert cleaned == [1]


async def test_a_periodic_call_that_breaks_goes_on_with_the_next() -> None:
    restarts: Counter[str] = Counter()
    background, calls = BackgroundTasks(restarts, first_pause=0.001), []

    def do() -> None:
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("dictionary changed size during iteration")

    background.every(0.001, "expire", do)
    await until(lambda: len(calls) >= 4)
    assert restarts["expire"] >= 2
    await background.stop()


async def test_pauses_grow_while_a_task_keeps_breaking() -> None:
    background, at = BackgroundTasks(first_pause=0.01), []
    clock = asyncio.get_running_loop().time

    async def work() -> None:
        at.append(clock())
        raise ValueError

    background.start("w", work)
    await until(lambda: len(at) == 5)
    await background.stop()
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert all(gap >= 0.01 * 2**number for number, gap in enumerate(gaps))
