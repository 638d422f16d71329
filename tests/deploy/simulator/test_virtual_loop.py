"""Time on the virtual loop: it jumps, it never waits, and what hangs in reality says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulator.virtual_loop import NothingWillHappen, VirtualLoop, run_virtually


def test_an_hour_passes_at_once() -> None:
    async def main(loop: VirtualLoop) -> float:
        async with asyncio.timeout(7200):
            await asyncio.sleep(3600)
        return loop.time()

    began = time.monotonic()
    assert run_virtually(main) == pytest.approx(3600)
    assert time.monotonic() - began < 5


@given(st.lists(st.floats(0, 1e4), max_size=30))
def test_sleepers_wake_in_the_order_of_their_times_and_at_them(seconds: list[float]) -> None:
    woken: list[tuple[float, float]] = []

    async def sleep(loop: VirtualLoop, delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append((delay, loop.time()))

    async def main(loop: VirtualLoop) -> None:
        await asyncio.gather(*(sleep(loop, delay) for delay in seconds))

    run_virtually(main)
    assert [delay for delay, _ in woken] == sorted(seconds)
    assert all(at == pytest.approx(delay, abs=1e-8) for delay, at in woken)


def test_a_timeout_comes_when_it_is_due() -> None:
    async def main(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return loop.time()

    assert run_virtually(main) == pytest.approx(2.5)


def test_what_waits_for_nothing_is_told_apart_from_what_takes_long() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingWillHappen):
        run_virtually(main)


def test_work_for_threads_runs_in_the_loops_own_thread_and_takes_no_time() -> None:
    async def main(loop: VirtualLoop) -> tuple[int, float]:
        return await asyncio.to_thread(threading.get_ident), loop.time()

    assert run_virtually(main) == (threading.get_ident(), 0.0)


def test_what_work_for_threads_raises_reaches_its_caller() -> None:
    def fail() -> None:
        raise LookupError("not here")

    async def main(loop: VirtualLoop) -> None:
        await asyncio.to_thread(fail)

    with pytest.raises(LookupError, match="not here"):
        run_virtually(main)


def test_a_callback_that_breaks_stops_everything() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def main(loop: VirtualLoop) -> None:
        loop.call_later(1, fail)
        await asyncio.sleep(100)

    with pytest.raises(ZeroDivisionError):
        run_virtually(main)


def test_tasks_left_behind_are_cancelled() -> None:
    ends: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ends.append("cancelled")

    async def main(loop: VirtualLoop) -> None:
        lingering.append(asyncio.create_task(linger()))
        await asyncio.sleep(1)

    lingering: list[asyncio.Task[None]] = []
    run_virtually(main)
    assert ends == ["cancelled"]


def test_generators_that_are_dropped_are_closed() -> None:
    ends: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            ends.append("closed")

    async def main(loop: VirtualLoop) -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(2)

    run_virtually(main)
    assert ends == ["closed"]
