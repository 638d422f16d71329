"""Whichever of two futures is done first ends the wait, and nothing is left of it on the other."""

from __future__ import annotations

import asyncio

import pytest

from serving.first_done import first_done

Ends = pytest.mark.parametrize("end", ["result", "error", "cancelled"])


def finish(future: asyncio.Future[None], how: str) -> None:
    if how == "result":
        future.set_result(None)
    elif how == "error":
        future.set_exception(ZeroDivisionError())
    else:
        future.cancel()


def take(future: asyncio.Future[None]) -> None:
    """An exception that nobody takes is warned of."""
    if not future.cancelled():
        future.exception()


@Ends
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("before", [True, False])
async def test_one_ends_the_wait_and_the_other_goes_on(end: str, first: int, before: bool) -> None:
    both = [asyncio.get_running_loop().create_future() for _ in range(2)]
    if before:
        finish(both[first], end)
    waiting = asyncio.create_task(first_done(*both))
    await asyncio.sleep(0)
    if not before:
        assert not waiting.done()
        finish(both[first], end)
    async with asyncio.timeout(60):
        await waiting
    assert not both[1 - first].done() and both[1 - first].remove_done_callback(print) == 0
    take(both[first])
    finish(both[1 - first], "result")


async def test_whoever_stops_waiting_cancels_neither() -> None:
    one, other = (asyncio.get_running_loop().create_future() for _ in range(2))
    waiting = asyncio.create_task(first_done(one, other))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not one.done() and not other.done()
    one.set_result(None)  # nobody is woken by it
    await asyncio.sleep(0)
