"""The gRPC forms of the links, against real services on loopback: everything a direct call does, and broken calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from grpc import aio

from decode.service import DecodeService
from prefill.service import PrefillService
from router.clients import RemoteSession, RemoteWorker
from serving.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    MillraceError,
    NoRoom,
    StaleLease,
    Unauthorized,
    WorkerLost,
)
from serving.links import LeaseEvent
from serving.messages import LeaseGrant, LeaseOrder, Prefilled, PrefillOrder, Role
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, server
from tests.decode.workers import Worker
from tests.fakes.sequences import make_order
from tests.prefill.scripted import written_out

KEY = "key"
PROMPT = [1, 2, 3]


class Remote:
    """A mixed worker behind gRPC and a router's link to it."""

    def __init__(self) -> None:
        self.worker = Worker(Role.MIXED)
        self.worker.runner.during = self.hold
        self.gate = threading.Event()
        self.gate.set()
        self.events: list[LeaseEvent] = []
        self.lost: list[MillraceError] = []

    def hold(self, work: object) -> None:
        """A step lasts until the gate is open."""
        assert self.gate.wait(10)

    async def start(self) -> None:
        self.server: aio.Server = server(KEY)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        DecodeService(self.worker.decode, self.worker.prefill).add_to(self.server)
        stubs.add_PrefillServicer_to_server(PrefillService(self.worker.prefill), self.server)
        await self.server.start()
        self.worker.start()
        self.link = RemoteWorker(Caller(self.address, KEY))

    async def stop(self) -> None:
        self.gate.set()
        await self.link.close()
        await self.server.stop(0)
        await self.worker.loop.stop()

    async def connect(self) -> RemoteSession:
        return await self.link.connect("router", self.events.extend, self.lost.append)

    def prefill(self, grant: LeaseGrant | None, max_tokens: int = 5) -> PrefillOrder:
        lease = grant.lease if grant is not None else None
        return PrefillOrder(order=make_order(PROMPT, lease=lease, max_tokens=max_tokens), grant=grant)

    async def gone(self) -> None:
        """Wait until the worker holds nothing."""
        async with asyncio.timeout(5):
            while not self.worker.idle():
                await asyncio.sleep(0.001)


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    made = Remote()
    await made.start()
    yield made
    await made.stop()


async def test_a_lease_lives_over_the_wire(remote: Remote) -> None:
    session = await remote.connect()
    grant = await session.open(make_order(PROMPT, lease=remote.worker.fence(), max_tokens=5))
    assert grant == LeaseGrant(lease=remote.worker.fence(), cached_tokens=0, address="local:decode", kv_dtype="float32")
    (prefilled,) = [one async for one in remote.link.run(remote.prefill(grant))]
    while not remote.events or remote.events[-1].delta is None or remote.events[-1].delta.finish is None:
        await asyncio.sleep(0.001)
    deltas = [prefilled.delta, *(event.delta for event in remote.events if event.delta is not None)]
    assert [token for delta in deltas for token in delta.tokens] == written_out(PROMPT, 5)
    await session.close()
    await remote.gone()
    assert len(remote.lost) == 1


async def test_answers_find_who_asked(remote: Remote) -> None:
    session = await remote.connect()
    orders = [make_order([n], lease=remote.worker.fence(f"r/{n}")) for n in range(8)]
    grants = await asyncio.gather(*(session.open(order) for order in orders))
    assert [grant.lease for grant in grants] == [order.lease for order in orders]
    with pytest.raises(NoRoom, match="its limit"):
        await session.open(make_order([9], lease=remote.worker.fence("r/9")))
    with pytest.raises(StaleLease):
        await session.advance(make_order([9], lease=remote.worker.fence("r/10", 1)))
    session.cancel("r/3")
    with pytest.raises(InvalidRequest):
        await session.open(orders[0])
    assert (await session.open(make_order([9], lease=remote.worker.fence("r/9")))).lease.lease == "r/9"
    await session.close()
    await remote.gone()


async def test_leaving_while_a_lease_is_opened_gives_it_back(remote: Remote) -> None:
    session = await remote.connect()
    opening = asyncio.create_task(session.open(make_order(PROMPT, lease=remote.worker.fence())))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    session.cancel("r/1")
    grant = await session.open(make_order(PROMPT, lease=remote.worker.fence("r/2")))
    assert list(remote.worker.decode.table.leases) == [grant.lease.lease]
    await session.close()


async def test_a_session_that_is_not_wanted_any_more_leaves_no_stream_open(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was stopped answers late: by then the router has given it up, and begins another session."""
    monkeypatch.setattr(RemoteSession, "_take", lambda session, reply: None)  # its welcome does not come
    connecting = asyncio.create_task(remote.connect())
    while not remote.worker.decode.sessions:
        await asyncio.sleep(0.001)
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await remote.gone()
    async with asyncio.timeout(30):
        while remote.worker.decode.sessions:
            await asyncio.sleep(0.001)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("session-")]


async def test_a_server_that_goes_away_is_a_lost_worker(remote: Remote) -> None:
    session = await remote.connect()
    await session.open(make_order(PROMPT, lease=remote.worker.fence()))
    await remote.server.stop(0)
    while not remote.lost:
        await asyncio.sleep(0.001)
    assert [type(error) for error in remote.lost] == [WorkerLost]
    with pytest.raises(WorkerLost):
        await session.open(make_order(PROMPT, lease=remote.worker.fence("r/2")))
    session.cancel("r/1")  # never fails
    await session.close()
    await remote.gone()


async def test_a_session_that_broke_leaves_nothing_waiting(remote: Remote) -> None:
    """gRPC takes requests from an iterator in a task of its own, which no end of the call wakes."""
    await remote.connect()
    await remote.server.stop(0)
    async with asyncio.timeout(5):
        while not remote.lost or any("_consume_request_iterator" in repr(task) for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)


async def test_nobody_there_is_a_lost_worker(remote: Remote) -> None:
    await remote.server.stop(0)
    with pytest.raises(WorkerLost):
        await remote.connect()
    with pytest.raises(WorkerLost):
        [one async for one in remote.link.run(remote.prefill(None))]
    with pytest.raises(WorkerLost):
        await remote.link.audit()


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_without_the_key_every_door_is_shut(remote: Remote, key: str | None) -> None:
    stranger = RemoteWorker(Caller(remote.address, key))
    with pytest.raises(Unauthorized):
        await stranger.connect("router", remote.events.extend, remote.lost.append)
    with pytest.raises(Unauthorized):
        [one async for one in stranger.run(remote.prefill(None))]
    await stranger.close()


async def test_a_refused_prefill_keeps_its_error(remote: Remote) -> None:
    with pytest.raises(StaleLease) as refused:
        await anext(
            remote.link.run(
                remote.prefill(LeaseGrant(lease=remote.worker.fence(), cached_tokens=0, address="", kv_dtype="float32"))
            )
        )
    assert refused.value.code == "lease"


async def test_leaving_a_prefill_cancels_it_at_the_worker(remote: Remote) -> None:
    remote.gate.clear()
    running = asyncio.ensure_future(anext(remote.link.run(remote.prefill(None))))
    while not remote.worker.prefill.sequences():
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    while remote.worker.prefill.sequences():
        await asyncio.sleep(0.001)
    remote.gate.set()
    await remote.gone()


async def test_closing_the_link_ends_its_session(remote: Remote) -> None:
    session = await remote.connect()
    await session.open(make_order(PROMPT, lease=remote.worker.fence()))
    await remote.link.close()
    while not remote.lost:
        await asyncio.sleep(0.001)
    await remote.gone()
    await session.close()


async def test_closing_the_link_under_a_prefill_is_a_lost_worker(remote: Remote) -> None:
    remote.gate.clear()

    async def run() -> str:
        try:
            async with aclosing(remote.link.run(remote.prefill(None))) as results:  # type: ignore[type-var]
                async for _ in results:
                    return "a token"
        except WorkerLost:
            return "lost"
        return "nothing"

    running = asyncio.create_task(run())
    while not remote.worker.prefill.sequences():
        await asyncio.sleep(0.001)
    await remote.link.close()
    (result,) = await asyncio.gather(running, return_exceptions=True)
    remote.gate.set()
    assert result == "lost"


async def test_a_fault_of_the_worker_is_told_as_one(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order's own, and its log names it: another worker may take it, and other leases of the session go on."""

    def faulty(order: object, session: str) -> LeaseGrant:
        raise ZeroDivisionError("a bug")

    session = await remote.connect()
    monkeypatch.setattr(remote.worker.decode, "open", faulty)
    with pytest.raises(WorkerLost, match="a bug"):
        await session.open(make_order(PROMPT, lease=remote.worker.fence("router/1")))
    assert remote.lost == []
    monkeypatch.undo()
    await session.open(make_order(PROMPT, lease=remote.worker.fence("router/2")))
    await session.close()
    assert any("a bug" in str(record.exc_info) for record in caplog.records if record.exc_info)
    await remote.gone()


# ---- prefills that are asked for with their leases ---------------------------------------------------------------


def with_prefill(remote: Remote, lease: str = "r/1", epoch: int = 0, **fields: Any) -> LeaseOrder:
    return make_order(PROMPT, lease=remote.worker.fence(lease, epoch), max_tokens=5, prefill=True, **fields)


async def first(remote: Remote, grant: LeaseGrant) -> Prefilled:
    async with asyncio.timeout(5):
        (prefilled,) = [one async for one in remote.link.run(remote.prefill(grant))]
    return prefilled


async def computing(remote: Remote) -> None:
    """Wait until the worker has a prefill in its step, which lasts."""
    while not remote.worker.engine.flying:
        await asyncio.sleep(0.001)


async def test_a_prefill_asked_for_with_its_lease_takes_no_call(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await remote.connect()
    monkeypatch.delattr(PrefillService, "Run")
    grant = await session.open(with_prefill(remote))
    while not session.prefills["r/1"].done():  # it is told before anybody asks
        await asyncio.sleep(0.001)
    deltas = [(await first(remote, grant)).delta]
    while deltas[-1].finish is None:
        await asyncio.sleep(0.001)
        deltas = [deltas[0], *(event.delta for event in remote.events if event.delta is not None)]
    assert [token for delta in deltas for token in delta.tokens] == written_out(PROMPT, 5)
    session.cancel("r/1")
    assert session.prefills == {}
    await session.close()
    await remote.gone()


@pytest.mark.parametrize("error", [NoRoom("full"), Draining("leaving")])
async def test_nothing_is_computed_for_a_lease_that_is_refused(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, error: MillraceError
) -> None:
    def refuse(order: object, session: str) -> LeaseGrant:
        raise error

    session = await remote.connect()
    monkeypatch.setattr(remote.worker.decode, "open", refuse)
    with pytest.raises(type(error)):
        await session.open(with_prefill(remote))
    assert session.prefills == {} and not remote.worker.prefill.sequences()


@pytest.mark.parametrize("ending", ["cancel", "leave", "close", "server"])
async def test_a_prefill_ends_with_its_lease(remote: Remote, ending: str) -> None:
    session = await remote.connect()
    remote.gate.clear()
    opening = asyncio.create_task(session.open(with_prefill(remote)))
    if ending != "leave":
        waiting = asyncio.create_task(first(remote, await opening))
    await computing(remote)
    if ending == "close":
        await session.close()
    elif ending == "server":
        await remote.server.stop(0)
    else:
        opening.cancel()  # to no effect, where it is open
        session.cancel("r/1")
    if ending != "leave":
        with pytest.raises(StaleLease if ending == "cancel" else WorkerLost):
            await waiting
    async with asyncio.timeout(5):
        while remote.worker.prefill.sequences() or remote.worker.decode.table.leases:
            await asyncio.sleep(0.001)
    assert session.prefills == {}
    remote.gate.set()
    await remote.gone()


async def test_a_lease_that_begins_anew_is_prefilled_by_a_call(remote: Remote) -> None:
    session = await remote.connect()
    remote.gate.clear()
    waiting = asyncio.create_task(first(remote, await session.open(with_prefill(remote))))
    await computing(remote)
    advancing = asyncio.create_task(session.advance(with_prefill(remote, epoch=1)))
    with pytest.raises(StaleLease):
        await waiting
    grant = await advancing
    remote.gate.set()
    assert list((await first(remote, grant)).delta.tokens) == written_out(PROMPT, 1)
    assert session.prefills == {}
    session.cancel("r/1")
    await remote.gone()


async def test_errors_of_a_prefill_come_in_its_session(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await remote.connect()
    for broken, raised in ((DeadlineExceeded("late"), DeadlineExceeded), (ZeroDivisionError("a bug"), WorkerLost)):

        async def run(order: PrefillOrder, broken: Exception = broken) -> AsyncIterator[Prefilled]:
            raise broken
            yield

        monkeypatch.setattr(remote.worker.prefill, "run", run)
        with pytest.raises(raised, match=str(broken)):
            await first(remote, await session.open(with_prefill(remote)))
        session.cancel("r/1")
    assert remote.lost == []

    async def nothing(order: PrefillOrder) -> AsyncIterator[Prefilled]:
        for prefilled in ():
            yield prefilled

    monkeypatch.setattr(remote.worker.prefill, "run", nothing)
    with pytest.raises(WorkerLost, match="without a token"):
        await first(remote, await session.open(with_prefill(remote)))


async def test_a_worker_without_prefill_refuses_to_compute_prompts(remote: Remote) -> None:
    other = server(KEY)
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    DecodeService(remote.worker.decode).add_to(other)
    await other.start()
    link = RemoteWorker(Caller(address, KEY))
    session = await link.connect("router", remote.events.extend, remote.lost.append)
    with pytest.raises(InvalidRequest) as refused:
        await session.open(with_prefill(remote))
    assert refused.value.param == "prefill" and remote.worker.idle()
    await session.close()
    await link.close()
    await other.stop(0)
