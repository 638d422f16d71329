"""The gRPC forms of the links, against real services on loopback: everything a direct call does, and broken calls."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from router.clients import RemoteSession, RemoteWorker
from serving.errors import (
    InvalidRequest,
    MillraceError,
    NoRoom,
    StaleLease,
    Unauthorized,
    WorkerLost,
)
from serving.messages import LeaseGrant
from serving.rpc import Caller
from tests.fakes import refused_early
from tests.fakes.sequences import make_order
from tests.prefill.scripted import written_out
from tests.router.remote import PROMPT, Remote


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
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
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


@pytest.mark.parametrize(("key", "told"), [("wrong", Unauthorized), (refused_early.KEY, WorkerLost)])
async def test_a_session_that_ends_without_a_word_is_asked_about(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, key: str, told: type[MillraceError]
) -> None:
    """A server that has no such method ends the stream as early as one that refuses it."""
    async with refused_early.refusing_early(monkeypatch) as server:
        stranger = RemoteWorker(Caller(server.address, key))
        with pytest.raises(told):
            await stranger.connect("router", remote.events.extend, remote.lost.append)
        await stranger.close()
    assert server.hidden or key == refused_early.KEY
    assert [type(error) for error in remote.lost] == [told]


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
