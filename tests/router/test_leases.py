"""The router's end of a lease: what arrives for it, in order and of the right try, until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from router.leases import PrefillOnlyLease, RouterLease, Sessions, WorkerSession
from router.request_state import RequestState
from serving.errors import CorruptChunk, InvalidRequest, NoRoom, Preempted, WorkerLost
from serving.links import LeaseEvent
from serving.messages import Delta, FinishReason
from tests.router.conftest import wanted
from tests.router.scripted import ScriptedSession, ScriptedWorker, make_status


@pytest.fixture
def worker() -> ScriptedWorker:
    return ScriptedWorker(make_status("d"), {})


@pytest.fixture
async def session(worker: ScriptedWorker) -> WorkerSession:
    return await WorkerSession.connect(worker, worker.status.instance, "router", lambda: 0.0)


def state(generated: Sequence[int] = ()) -> RequestState:
    return RequestState(request=wanted(), generated=list(generated))


def delta(index: int, *, last: bool = False) -> Delta:
    return Delta(index=index, tokens=(index,), finish=FinishReason.LENGTH if last else None)


def events(session: WorkerSession, *items: LeaseEvent) -> None:
    inner = session.session
    assert isinstance(inner, ScriptedSession)
    inner.deliver(items)


async def gathered(lease: RouterLease) -> list[int]:
    found = [await lease.next()]
    while found[-1].finish is None:
        found.append(await lease.next())
    return [one.index for one in found]


async def test_deltas_come_in_order_until_the_finish(session: WorkerSession) -> None:
    lease = await session.open("r/1", state())
    events(session, *(LeaseEvent("r/1", 0, delta(n)) for n in range(3)))
    events(session, LeaseEvent("r/2", 0, delta(9)), LeaseEvent("r/1", 0, delta(3, last=True)))
    assert await gathered(lease) == [0, 1, 2, 3]
    lease.close()


async def test_what_is_of_an_earlier_try_is_dropped(session: WorkerSession) -> None:
    lease = await session.open("r/1", state())
    events(session, LeaseEvent("r/1", 0, delta(0)))
    await lease.advance(state([7]))
    assert lease.fence.epoch == 1 and lease.grant is not None and lease.grant.lease == lease.fence
    events(session, LeaseEvent("r/1", 0, delta(1)), LeaseEvent("r/1", 0, error=Preempted("late")))
    events(session, LeaseEvent("r/1", 1, delta(2, last=True)))
    assert await gathered(lease) == [2] and not lease.failed.done()
    lease.close()


async def test_an_error_ends_the_lease_after_the_tokens_before_it(session: WorkerSession) -> None:
    lease = await session.open("r/1", state())
    events(session, LeaseEvent("r/1", 0, delta(0)), LeaseEvent("r/1", 0, error=Preempted("first")))
    events(session, LeaseEvent("r/1", 0, error=Preempted("second")))
    assert (await lease.next()).index == 0, "what came before the error counts"
    with pytest.raises(Preempted, match="first"):
        await lease.next()
    assert lease.failed.result().message == "first"
    with pytest.raises(Preempted, match="first"):
        await lease.advance(state())
    lease.close()


async def test_an_interrupted_lease_can_begin_anew(session: WorkerSession) -> None:
    lease = await session.open("r/1", state())
    lease.interrupt(CorruptChunk("x"))
    with pytest.raises(CorruptChunk):
        await gathered(lease)
    assert not lease.failed.done()
    await lease.advance(state())
    events(session, LeaseEvent("r/1", 1, delta(0, last=True)))
    assert await gathered(lease) == [0]
    lease.close()


async def test_a_lease_whose_worker_decodes_is_not_interrupted(session: WorkerSession) -> None:
    """The KV has come, then; the prefill call may still break, when its worker dies or the last reply is lost."""
    lease = await session.open("r/1", state())
    events(session, LeaseEvent("r/1", 0, delta(0)))
    lease.interrupt(CorruptChunk("x"))
    events(session, LeaseEvent("r/1", 0, delta(1, last=True)))
    assert await gathered(lease) == [0, 1]
    lease.close()


async def test_one_that_begins_anew_is_interrupted_again(session: WorkerSession) -> None:
    lease = await session.open("r/1", state())
    events(session, LeaseEvent("r/1", 0, delta(0)))
    await lease.advance(state([7]))
    lease.interrupt(CorruptChunk("x"))
    with pytest.raises(CorruptChunk):
        await lease.next()
    lease.close()


async def test_a_lost_session_ends_all_its_leases(session: WorkerSession, worker: ScriptedWorker) -> None:
    leases = [await session.open(f"r/{n}", state()) for n in range(3)]
    worker.lose_sessions()
    for lease in leases:
        with pytest.raises(WorkerLost):
            await gathered(lease)
        lease.close()
    assert session.leases == {} and not worker.cancelled, "there is nobody to tell"
    with pytest.raises(WorkerLost):
        await session.open("r/9", state())


async def test_a_session_that_was_lost_while_nobody_held_a_lease_is_made_anew(worker: ScriptedWorker) -> None:
    sessions, instance = Sessions("router", lambda: 0.0), worker.status.instance
    (await sessions.open(worker, instance, "r/1", state())).close()
    worker.lose_sessions()
    lease = await sessions.open(worker, instance, "r/2", state())
    assert lease.grant is not None and worker.opened == {"r/1": 1, "r/2": 1}
    await sessions.close()


async def test_a_session_that_was_not_made_is_tried_anew(worker: ScriptedWorker) -> None:
    sessions, instance = Sessions("router", lambda: 0.0), worker.status.instance
    worker.script.connect = [WorkerLost("no way there")]
    with pytest.raises(WorkerLost):
        await sessions.open(worker, instance, "r/1", state())
    assert (await sessions.open(worker, instance, "r/2", state())).grant is not None
    await sessions.close()


@pytest.mark.parametrize("error", [NoRoom("full"), InvalidRequest("no")])
async def test_a_refused_lease_is_not_kept(session: WorkerSession, worker: ScriptedWorker, error: Exception) -> None:
    worker.script.open = [error]
    with pytest.raises(type(error)):
        await session.open("r/1", state())
    assert session.leases == {}


async def test_leaving_while_a_lease_is_opened_gives_it_back(session: WorkerSession, worker: ScriptedWorker) -> None:
    opening = asyncio.create_task(session.open("r/1", state()))
    await asyncio.sleep(0)
    assert session.leases and worker.opened == {"r/1": 1}
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert session.leases == {} and worker.cancelled == {"r/1": 1}


async def test_a_lease_is_closed_once(session: WorkerSession, worker: ScriptedWorker) -> None:
    lease = await session.open("r/1", state())
    lease.close()
    lease.close()
    events(session, LeaseEvent("r/1", 0, delta(0)))  # a late token finds nobody
    assert worker.cancelled == {"r/1": 1} and worker.leases() == []


async def test_a_request_without_a_lease_has_nothing_to_fail() -> None:
    lease = PrefillOnlyLease("r/1")
    lease.interrupt(CorruptChunk("x"))
    await lease.advance(state())
    assert lease.grant is None and not lease.failed.done() and lease.fence.instance == ""
    with pytest.raises(AssertionError):
        await lease.next()
