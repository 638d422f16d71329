"""The fleet: who is asked, in what order, how long one waits, and what becomes of workers that stop answering."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serving.errors import (
    ContextLengthExceeded,
    CorruptChunk,
    InternalError,
    MillraceError,
    NoRoom,
    Overloaded,
    StaleLease,
    Unauthorized,
    Unavailable,
    WorkerLost,
)
from serving.messages import Role
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG, Script


async def finished(running: asyncio.Task[list[int]], seconds: float = 5.0) -> list[int]:
    """The request's tokens; TimeoutError if it does not end in this time."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_least_loaded_worker_is_asked_first(world: World) -> None:
    world.add("a", running=4)
    world.add("b", running=1)
    await world.tokens(wanted())
    assert world.workers["b"].opened and not world.workers["a"].opened


async def test_requests_spread_over_equal_workers(world: World) -> None:
    for name in ("a", "b", "c"):
        world.add(name)
    await asyncio.gather(*(world.tokens(wanted(str(n), max_tokens=50)) for n in range(6)))
    assert [len(worker.opened) for worker in world.workers.values()] == [2, 2, 2]


async def test_a_draining_worker_gets_nothing_new(world: World) -> None:
    world.add("a", draining=True)
    world.add("b")
    await world.tokens(wanted())
    assert not world.workers["a"].sessions


async def test_one_session_serves_all_requests_of_a_worker(world: World) -> None:
    worker = world.add("a")
    await asyncio.gather(*(world.tokens(wanted(str(n))) for n in range(5)))
    assert len(worker.sessions) == 1


async def test_after_a_lost_session_a_new_one_is_begun(world: World) -> None:
    worker = world.add("a")
    await world.tokens(wanted("1"))
    worker.lose_sessions()
    running = asyncio.create_task(world.tokens(wanted("2")))
    await world.settled()
    assert not running.done(), "nothing goes to a worker before it is heard of again"
    world.beat()
    assert await running == expected(wanted("2"))
    assert len(worker.sessions) == 2


async def test_a_silent_worker_is_given_nothing_and_its_leases_go_elsewhere(world: World) -> None:
    silent = world.add("a")
    silent.script.decode = [(2, HANG)]
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    world.let_pass(4)
    other = world.add("b")
    world.let_pass(2)
    assert await finished(running) == expected(wanted())
    assert other.opened and silent.opened
    silent.lose_sessions()  # whatever it still holds is its own affair here


async def test_a_forgotten_workers_link_is_closed(world: World) -> None:
    worker = world.add("a")
    await world.tokens(wanted())
    world.let_pass(16)
    await world.settled()
    assert worker.link_closed == 1 and world.fleet.registry.workers == {}


async def test_a_worker_that_was_restarted_leaves_no_session_behind(world: World) -> None:
    """It comes back under its name and address, so the life before it never falls silent."""
    world.add("a")
    await world.tokens(wanted("1"))
    world.add("a", instance="a-next")
    await world.tokens(wanted("2"))
    world.fleet.expire()
    await world.settled()
    assert [session.instance for session in world.fleet.sessions.established()] == ["a-next"]


async def test_workers_that_do_not_decode_are_not_asked_to(world: World) -> None:
    world.add("p", Role.PREFILL)
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    assert not world.workers["p"].sessions
    world.add("d", Role.DECODE)
    assert await running == expected(wanted())


async def test_prefill_goes_to_workers_of_the_same_model(world: World) -> None:
    world.add("other", Role.PREFILL, fingerprint="another", pairing="another")
    world.add("same", Role.PREFILL, waiting_tokens=1000)
    world.add("d", Role.DECODE)
    await world.tokens(wanted())
    assert not world.workers["other"].orders and world.workers["same"].orders


async def test_a_refusal_for_good_is_told_at_once(world: World) -> None:
    world.add("a").script.open = [ContextLengthExceeded("too long", param="prompt")]
    with pytest.raises(ContextLengthExceeded):
        await world.tokens(wanted())


async def test_an_audit_that_breaks_leaves_the_others(world: World) -> None:
    world.add("a").audit_error = WorkerLost("gone")
    world.add("b")
    _, *audits = await world.router.audit()
    assert [audit.service for audit in audits] == ["b"]


async def test_closing_the_fleet_closes_what_it_opened() -> None:
    world = World()
    worker = world.add("a")
    await world.tokens(wanted())
    await world.fleet.close()
    assert worker.link_closed == 1 and [session.closed for session in worker.sessions] == [True]


# ---- workers that stop answering -----------------------------------------------------------------------------------


async def test_a_worker_that_was_only_out_of_reach_frees_what_it_held() -> None:
    """It was silent for a while, and lives: its session must end, or what is in it is held for ever."""
    world = World()
    worker = world.add("a", Role.DECODE)
    prefill = world.add("p", Role.PREFILL)
    prefill.script.before_first = [HANG]  # the lease waits for its KV
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    assert len(worker.leases()) == 1
    world.fleet.suspect(worker.status.instance, WorkerLost("no heartbeat"))
    world.beat()
    assert await finished(running) == expected(wanted())
    await world.settled()
    assert worker.leases() == []


async def test_a_lease_that_was_never_answered_is_asked_for_by_another_name(world: World) -> None:
    """The worker may have granted the first, and not heard yet that nobody wants it."""
    worker = world.add("a")
    worker.script.open = [HANG]
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    world.fleet.suspect(worker.status.instance, WorkerLost("no heartbeat"))
    world.beat()
    assert await finished(running) == expected(wanted())
    assert list(worker.opened.values()) == [1, 1]


async def test_a_worker_that_stops_answering_while_a_lease_is_opened_is_given_up() -> None:
    world = World()
    world.add("a").script.open = [HANG]
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    world.let_pass(4)
    world.add("b")
    world.let_pass(2)
    assert await finished(running) == expected(wanted())


async def test_a_worker_that_stops_answering_while_a_lease_begins_anew_is_given_up() -> None:
    world = World()
    world.add("a").script = Script(before_first=[CorruptChunk("harmed")], advance=[HANG])
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    assert not running.done()
    world.let_pass(4)
    world.add("b")
    world.let_pass(2)
    assert await finished(running) == expected(wanted())


async def test_a_worker_that_never_welcomes_holds_nobody_up() -> None:
    world = World()
    world.add("a").script.connect = [HANG]
    first = asyncio.create_task(world.tokens(wanted("1")))
    await world.settled()
    world.let_pass(4)
    world.add("b")
    world.let_pass(2)
    second = asyncio.create_task(world.tokens(wanted("2")))
    try:
        assert await finished(second) == expected(wanted("2"))
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await world.fleet.close()


async def test_a_prefill_worker_that_falls_silent_is_given_up() -> None:
    world = World()
    world.add("p0", Role.PREFILL).script.before_first = [HANG]
    world.add("d", Role.DECODE)
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    world.let_pass(4)
    world.add("p1", Role.PREFILL)
    world.fleet.heartbeat(world.workers["d"].status)
    world.let_pass(2)
    assert await finished(running) == expected(wanted())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(asyncio.CancelledError(), id="channel closed"),
        pytest.param(ValueError("a reply that cannot be read"), id="bad reply"),
    ],
)
@pytest.mark.parametrize("point", ["before_first", "after_first"])
async def test_a_prefill_call_that_ends_in_no_error_of_ours_is_an_error(error: BaseException, point: str) -> None:
    """A channel closed under a call cancels it: that is how a forgotten worker's calls end."""
    world = World()
    world.add("a")
    world.add("b")
    setattr(world.workers["a"].script, point, [error])
    running = asyncio.create_task(world.tokens(wanted()))
    try:
        await finished(running)
    except MillraceError:
        return  # told as an error: that will do, too


@pytest.mark.parametrize(
    "error", [StaleLease("another life of this worker", code="instance"), Unauthorized("wrong key")], ids=str
)
@pytest.mark.parametrize("point", ["connect", "open"])
async def test_a_worker_that_is_not_what_it_seems_is_passed_over(point: str, error: MillraceError) -> None:
    """Restarted under the same address, or under another key: that is no fault of the request."""
    world = World()
    setattr(world.add("a").script, point, [error] * 100)
    world.add("b")
    assert await finished(asyncio.create_task(world.tokens(wanted()))) == expected(wanted())
    await world.fleet.close()


async def test_leases_of_a_workers_last_life_end_when_the_next_one_reports() -> None:
    world = World()
    worker = world.add("a")
    worker.script.decode = [(2, HANG)]
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    again = world.add("a")
    again.change(instance="a-next-life")
    world.fleet.heartbeat(again.status)
    for _ in range(8):
        world.now += 2
        world.fleet.heartbeat(again.status)
        world.fleet.expire()
    assert await finished(running) == expected(wanted())


async def test_the_wait_for_room_ends_with_the_requests_deadline() -> None:
    world = World()
    world.add("a").script.open = [NoRoom("full")] * 1000
    with pytest.raises(MillraceError) as refused:
        await world.tokens(wanted(deadline=world.now + 0.02))
    assert refused.value.status in (429, 503, 504)
    with pytest.raises(MillraceError):
        await world.tokens(wanted(deadline=world.now - 1))
    await world.settled()
    assert world.held() == {}


async def test_a_fleet_is_well_while_nothing_is_held_against_anyone(world: World) -> None:
    """Asked before the pairs are, of which there are thousands."""
    worker, _ = world.add("p", Role.PREFILL), world.add("d", Role.DECODE)
    fleet = world.fleet
    assert fleet.all_well and all(fleet.pair_health().values())
    fleet.registry.suspect("p-life")
    assert not fleet.all_well and not all(fleet.pair_health().values())
    world.beat()
    fleet.heartbeat(worker.change(stalled_seconds=99.0))
    assert not fleet.all_well and not all(fleet.pair_health().values())
    fleet.heartbeat(worker.change(stalled_seconds=0.0))
    assert fleet.all_well
    for fail in (
        lambda: fleet.breakers.failed("d-life", world.now),
        lambda: fleet.links.failed("p-life", "d-life", 0.0),
    ):
        fail()
        assert not fleet.all_well and not all(fleet.pair_health().values())
        fleet.trust.retain((), world.now)
        assert fleet.all_well


async def test_a_failed_request_is_not_held_against_the_next(world: World) -> None:
    world.add("a").script.before_first = [InternalError("a bug")]
    with pytest.raises(InternalError):
        await world.tokens(wanted("1"))
    assert await world.tokens(wanted("2")) == expected(wanted("2"))


async def test_a_request_refused_for_want_of_workers_leaves_no_trace() -> None:
    world = World(patience=0.02)
    with pytest.raises(Unavailable):
        await world.tokens(wanted())
    assert world.held() == {} and replace(world.fleet.config, name="x").patience == 0.02


async def test_all_who_find_no_room_in_time_are_told_so() -> None:
    """Also those whose turn to look never came: they waited behind one that found every worker full."""
    world = World(patience=300.0)
    world.add("a").script.open = [NoRoom("full")] * 1000
    asked = await world.outlasted(*(wanted(str(n)) for n in range(5)))
    assert [(type(error), getattr(error, "code", None)) for error in asked] == [(Overloaded, "no_room")] * 5
    assert world.held() == {}
    await world.fleet.close()


async def test_a_worker_that_was_forgotten_and_comes_back_has_its_counts_right() -> None:
    world = World()
    worker = world.add("a")
    deltas = world.router.generate(wanted(max_tokens=50))
    await anext(aiter(deltas))
    world.let_pass(100)
    assert world.fleet.registry.workers == {}
    world.fleet.heartbeat(worker.status)
    await deltas.aclose()  # type: ignore[attr-defined]
    await world.settled()
    assert world.held() == {}
    await world.fleet.close()
