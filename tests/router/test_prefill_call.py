"""One prefill try: its first token or what came instead, and an end that is told once."""

from __future__ import annotations

import asyncio

import pytest

from router.prefill_call import PrefillCall
from serving.errors import CorruptChunk, MillraceError, Preempted, WorkerLost
from serving.messages import PrefillOrder
from tests.fakes.sequences import make_order
from tests.router.scripted import HANG, ScriptedWorker, make_status


class Watched:
    """A lease as the run sees it."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[MillraceError] = asyncio.get_running_loop().create_future()
        self.interrupted: list[MillraceError] = []

    def interrupt(self, error: MillraceError) -> None:
        self.interrupted.append(error)


class Try:
    def __init__(self, max_tokens: int = 1) -> None:
        self.worker = ScriptedWorker(make_status("p"), {})
        self.lease = Watched()
        self.endings = 0
        order = PrefillOrder(order=make_order([1, 2], max_tokens=max_tokens), grant=None)
        self.run = PrefillCall(self.worker, order, self.lease, self.ended)

    def ended(self, call: PrefillCall) -> None:
        assert call is self.run
        self.endings += 1


async def test_the_first_token_comes_out() -> None:
    one = Try()
    async with one.run as run:
        assert (await run.first()).delta.index == 0
    assert one.endings == 1 and one.worker.runs == 0 and one.lease.interrupted == []


async def test_an_error_before_the_first_token_is_raised_there() -> None:
    one = Try()
    one.worker.script.before_first = [CorruptChunk("x")]
    async with one.run as run:
        with pytest.raises(CorruptChunk):
            await run.first()
    assert one.endings == 1 and one.lease.interrupted == []


async def test_an_error_after_the_first_token_goes_to_the_lease() -> None:
    one = Try(max_tokens=2)
    one.worker.script.after_first = [CorruptChunk("x")]
    async with one.run as run:
        await run.first()
        while not one.endings:
            await asyncio.sleep(0)
    assert [type(error) for error in one.lease.interrupted] == [CorruptChunk] and one.endings == 1


async def test_a_run_without_a_token_is_a_lost_worker() -> None:
    one = Try()
    one.worker.script.before_first = ["empty"]
    async with one.run as run:
        with pytest.raises(WorkerLost):
            await run.first()


async def test_a_lease_that_ends_is_not_waited_for() -> None:
    one = Try()
    one.worker.script.before_first = [HANG]
    async with one.run as run:
        asyncio.get_running_loop().call_soon(one.lease.failed.set_result, Preempted("x"))
        with pytest.raises(Preempted):
            await run.first()
        assert one.worker.runs == 1
    assert one.worker.runs == 0 and one.endings == 1


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_leaving_cancels_the_prefill_wherever_it_is(turns: int) -> None:
    one = Try(max_tokens=2)
    one.worker.script.after_first = [HANG]
    async with one.run:
        for _ in range(turns):
            await asyncio.sleep(0)
    assert one.worker.runs == 0 and one.lease.interrupted == []
    await asyncio.sleep(0)
    assert one.endings == 1
