"""The decode worker's session: an order that breaks is that order's error, and everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from math import inf, nan
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.service import DecodeService
from decode.worker import DecodeWorker
from serving.errors import StaleLease
from serving.messages import LeaseOrder, Role, Slo
from serving.proto import millrace_pb2 as pb
from serving.wire import to_pb
from tests.decode.workers import Worker
from tests.fakes.sequences import make_order


class Router:
    """Asks over one session, request by request."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.requests: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self.requests.put_nowait(pb.SessionRequest(hello="router"))
        context: Any = None  # asked for when a session ends with an error, and none here does
        self.replies = DecodeService(worker.decode).Session(self._asked(), context)

    async def _asked(self) -> AsyncIterator[pb.SessionRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    def order(self, lease: str, **fields: Any) -> pb.LeaseOrder:
        order: LeaseOrder = make_order([1, 2, 3], lease=self.worker.fence(lease), **fields)
        return to_pb(order, pb.LeaseOrder)

    async def reply(self) -> pb.SessionReply:
        async with asyncio.timeout(60):
            return await anext(self.replies)

    async def ask(self, order: pb.LeaseOrder, kind: str = "open") -> pb.LeaseAnswer:
        self.requests.put_nowait(pb.SessionRequest(**{kind: order}))
        while not (reply := await self.reply()).HasField("answer"):
            assert reply.events
        answer = reply.answer
        assert answer.lease == order.lease
        return answer

    def cancel(self, lease: str) -> None:
        self.requests.put_nowait(pb.SessionRequest(cancel=lease))


async def test_an_order_that_breaks_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(Role.MIXED)
    router = Router(worker)
    async with aclosing(router.replies):
        assert (await router.reply()).welcome
        assert (await router.ask(router.order("r/1"))).HasField("grant")
        broken = router.order("r/2")
        broken.request.sampling.bias_tokens.append(1)  # and no value
        answer = await router.ask(broken)
        assert answer.error.kind == "WorkerLost" and "ValueError" in caplog.text

        enter = worker.decode.table._enter
        monkeypatch.setattr(type(worker.decode.table), "_enter", lambda *_: {}["a mistake of ours"])
        for kind, lease in (("open", "r/3"), ("advance", "r/1")):
            order = router.order(lease)
            order.lease.epoch += kind == "advance"
            assert (await router.ask(order, kind)).error.kind == "WorkerLost"
        monkeypatch.setattr(type(worker.decode.table), "_enter", lambda _, *rest: enter(*rest))
        assert worker.idle(), "what broke holds nothing"
        assert (await router.ask(router.order("r/4"))).HasField("grant")
        assert list(worker.decode.table.leases) == ["r/4"]
    assert worker.idle()


async def test_an_epoch_that_does_not_follow_holds_nothing() -> None:
    worker = Worker(Role.DECODE)
    session = await worker.session()
    await worker.lease(session, [1, 2, 3, 4, 5])
    with pytest.raises(StaleLease):
        await session.advance(make_order([1, 2, 3, 4, 5], lease=worker.fence(epoch=0)))
    assert worker.idle()


DOUBLES = st.sampled_from([None, 0.0, -1.0, 5e-324, 1e-3, 1.0, 1e300, -1e300, inf, -inf, nan])
COUNTS = st.sampled_from([0, 1, 2, 2**31, 2**32 - 1])


@settings(max_examples=30, deadline=None)
@given(
    times=st.lists(st.tuples(DOUBLES, DOUBLES, DOUBLES, DOUBLES), min_size=2, max_size=4),
    priority=st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]),
    count=COUNTS,
    top_k=COUNTS,
)
def test_whatever_fits_on_the_wire_is_answered_and_stops_no_engine(
    times: list[tuple[float | None, ...]], priority: int, count: int, top_k: int
) -> None:
    """The numbers go into schedulers: one that raises would end every request of the worker."""

    async def play() -> None:
        worker = Worker(Role.MIXED, blocks=64)
        router = Router(worker)
        async with aclosing(router.replies):
            await router.reply()
            for number, (ttft, tpot, due, ends) in enumerate(times):
                order = router.order(
                    f"r/{number}",
                    slo=Slo(ttft_ms=ttft, tpot_ms=tpot),
                    first_token_in=due,
                    ends_in=ends,
                    sheddable=bool(count),
                    priority=priority if number % 2 else -priority - 1,
                    max_tokens=max(1, count),
                    min_tokens=count,
                    top_k=top_k,
                )
                answer = await router.ask(order)
                if answer.HasField("grant"):
                    worker.prefilling.add(worker.decode.adopt(worker.fence(f"r/{number}")))
            for _ in range(6):
                worker.step()
            worker.worker.status()
            await asyncio.sleep(0)
        assert worker.idle()

    asyncio.run(play())


async def test_a_stream_that_is_cancelled_as_it_ends_gives_its_leases_up() -> None:
    """Both come when a router leaves: the end of what it sends, and the end of the call."""
    closed, held = asyncio.Event(), asyncio.Event()

    class Session:
        name = "router"

        async def close(self) -> None:
            closed.set()

    class Opener:
        async def connect(self, *_: object) -> Session:
            return Session()

    async def requests() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(hello="router")
        try:
            await asyncio.Event().wait()
        finally:
            await held.wait()  # reading does not end at once

    async def serve() -> None:
        service = DecodeService(cast(DecodeWorker, Opener()))
        async for _ in service.Session(requests(), cast(Any, None)):
            pass

    serving = asyncio.create_task(serve())
    for _ in range(2):
        await asyncio.sleep(0.01)
        serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert closed.is_set()
    held.set()
