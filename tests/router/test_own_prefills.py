"""Prefills that are asked for with their leases, over the wire: they come in the session, and end with the lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from decode import service
from decode.service import DecodeService
from prefill.service import PrefillService
from router.clients import RemoteWorker
from router.prefill_call import BROKEN_CALL
from serving.errors import DeadlineExceeded, Draining, InvalidRequest, MillraceError, NoRoom, StaleLease, WorkerLost
from serving.messages import LeaseGrant, LeaseOrder, Prefilled, PrefillOrder
from serving.proto import millrace_pb2 as pb
from serving.rpc import Caller, server
from tests.fakes.sequences import make_order
from tests.prefill.scripted import written_out
from tests.router.remote import KEY, PROMPT, Remote


def with_prefill(remote: Remote, lease: str = "r/1", epoch: int = 0, **fields: Any) -> LeaseOrder:
    return make_order(PROMPT, lease=remote.worker.fence(lease, epoch), max_tokens=5, prefill=True, **fields)


async def first(remote: Remote, grant: LeaseGrant) -> Prefilled:
    async with asyncio.timeout(60):
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
    while not session._latest.prefills["r/1"].done():  # it is told before anybody asks
        await asyncio.sleep(0.001)
    deltas = [(await first(remote, grant)).delta]
    while deltas[-1].finish is None:
        await asyncio.sleep(0.001)
        deltas = [deltas[0], *(event.delta for event in remote.events if event.delta is not None)]
    assert [token for delta in deltas for token in delta.tokens] == written_out(PROMPT, 5)
    session.cancel("r/1")
    assert session._latest.prefills == {}
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
    assert session._latest.prefills == {} and not remote.worker.prefill.sequences()


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
    async with asyncio.timeout(60):
        while remote.worker.prefill.sequences() or remote.worker.decode.table.leases:
            await asyncio.sleep(0.001)
    assert session._latest.prefills == {}
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
    assert session._latest.prefills == {}
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


@pytest.mark.parametrize("what", ["_prefilled_to_pb", "event_to_pb"])
async def test_what_cannot_be_read_is_one_leases_error(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Others share the session: a word that a router does not know must not end it."""
    make: Callable[..., Any] = getattr(service, what)

    def unreadable(*arguments: Any) -> Any:
        message = make(*arguments)
        first_token = isinstance(message, pb.LeasePrefilled)
        if (message.lease.lease if first_token else message.lease) == "r/2":
            (message.prefilled.delta if first_token else message.delta).finish = "a word of a later version"
        return message

    session = await remote.connect()
    good = await session.open(with_prefill(remote, "r/1"))
    monkeypatch.setattr(service, what, unreadable)
    grant = await session.open(with_prefill(remote, "r/2"))
    if what == "_prefilled_to_pb":
        with pytest.raises(WorkerLost) as broken:
            [one async for one in remote.link.run(PrefillOrder(order=with_prefill(remote, "r/2"), grant=grant))]
        error: MillraceError = broken.value
    else:
        async with asyncio.timeout(60):
            while not (errors := [event.error for event in remote.events if event.lease == "r/2" and event.error]):
                await asyncio.sleep(0.001)
        error = errors[0]
    assert error.code == BROKEN_CALL
    assert (await first(remote, good)).delta.tokens and remote.lost == []
    await session.close()
    await remote.gone()
