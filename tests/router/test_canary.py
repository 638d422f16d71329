"""The canary tries idle pairs with a real token: what is broken turns red, and green again; users notice nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from router import canary as canaries
from router.breaker import BreakerState
from router.canary import TENANT, Canary
from router.candidate import Candidate
from router.registry import RegisteredWorker
from router.request_state import RequestState
from serving.errors import Draining, InternalError, MillraceError, NoRoom, WorkerLost
from serving.links import LeaseEvent
from serving.messages import Delta, Role
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG

pytestmark = pytest.mark.usefixtures("ties_by_name")

INTERVAL = 2.0
PATIENCE = 2.0  # seconds of real time: what hangs is given up after so long


async def probed(world: World, canary: Canary | None = None) -> Canary:
    """One round, to its end."""
    canary = canary or Canary(world.fleet, INTERVAL, patience=PATIENCE)
    canary.begin_due()
    async with asyncio.timeout(60):
        while canary._running:
            await asyncio.sleep(0.001)
    return canary


def red(world: World) -> set[tuple[str, str]]:
    return {names for names, well in world.fleet.pair_health().items() if not well}


async def test_every_pair_is_tried_with_a_token_of_its_own(split: World) -> None:
    canary = await probed(split)
    assert canary.outcomes == {"ok": 4} and red(split) == set()
    orders = [order for name in ("p0", "p1") for order in split.workers[name].orders]
    assert len(orders) == 4 and all(order.order.request.tenant == TENANT for order in orders)
    assert split.seen.firsts == [] and split.seen.endings == [], "users' metrics know nothing of it"


async def test_canaries_of_several_routers_name_their_leases_apart(split: World) -> None:
    """Else a worker refuses the second as open already, or one router ends the other's."""
    await probed(split)
    split.now += INTERVAL
    await probed(split)
    assert [*split.workers["d0"].opened.values(), *split.workers["d1"].opened.values()] == [1] * 8


async def test_a_mixed_worker_is_a_pair_of_its_own(world: World) -> None:
    world.add("m")
    world.add("p", Role.PREFILL)
    assert (await probed(world)).outcomes == {"ok": 1}
    assert world.workers["m"].asked_to_prefill, "the canary goes the way that requests go"


async def test_a_pair_that_was_tried_or_used_rests(split: World) -> None:
    canary = await probed(split)
    await probed(split, canary)
    assert canary.outcomes == {"ok": 4}
    split.now += INTERVAL
    await split.tokens(wanted())  # over p0 and d0
    await probed(split, canary)
    assert canary.outcomes == {"ok": 7}


async def test_a_link_that_drops_everything_turns_red_and_green_again(split: World) -> None:
    split.workers["p0"].script.after_first = [HANG]
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    await probed(split, canary)
    assert [prefill for prefill, _ in red(split)] == ["p0"] and canary.outcomes == {"ok": 3, "failed": 1}
    assert split.fleet.breakers.state("p0-life") is BreakerState.CLOSED, "the way is to blame, not its ends"
    assert await split.tokens(wanted()) == expected(wanted()) and split.seen.replacements == [], "no request tries it"
    split.now += INTERVAL
    await probed(split, canary)
    assert red(split) == set()


async def test_a_request_whose_kv_is_stuck_on_a_dead_link_goes_on_elsewhere(split: World) -> None:
    """The network may take a quarter of a minute to say that nothing gets through."""
    split.workers["p0"].script.after_first = [HANG, HANG]  # the request's, and the canary's
    running = asyncio.create_task(split.tokens(wanted()))
    await split.settled()
    assert split.seen.firsts and not running.done()
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    p0, d0 = (split.fleet.registry.get(f"{name}-life") for name in ("p0", "d0"))
    assert p0 is not None and d0 is not None
    await canary.probe(Candidate(p0.status), Candidate(d0.status))
    assert await asyncio.wait_for(running, 60) == expected(wanted())
    assert [getattr(error, "code", None) for error in split.seen.replacements] == ["decode_lost"]


async def test_a_link_that_refuses_turns_red(split: World) -> None:
    split.workers["p1"].unreachable.add("local:d0")
    await probed(split)
    assert red(split) == {("p1", "d0")}


async def test_a_worker_that_reports_but_does_not_work_turns_all_its_pairs_red(split: World) -> None:
    split.workers["p1"].script.before_first = [HANG] * 10
    canary = await probed(split)
    assert red(split) == {("p1", "d0"), ("p1", "d1")}
    assert canary.outcomes == {"ok": 2, "failed": 2}


async def test_a_decode_worker_that_grants_nothing_turns_all_its_pairs_red(split: World) -> None:
    split.workers["d0"].script.open = [HANG] * 10
    await probed(split)
    assert red(split) == {("p0", "d0"), ("p1", "d0")}
    split.workers["d0"].lose_sessions()


async def test_a_router_that_stood_still_takes_no_answer_for_missing(
    split: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: what hung at the standstill was given up at its end, and what the worker held was moved."""
    worker, answers = split.workers["p0"], asyncio.Event()
    play = worker.play

    async def late(*given: Any) -> Any:
        await answers.wait()
        return await play(*given)

    monkeypatch.setattr(canaries, "LOOK", 0.05)
    worker.play = late  # type: ignore[method-assign]
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    canary.begin_due()
    await split.settled()
    time.sleep(1.5 * PATIENCE)  # noqa: ASYNC251 - nothing of the router runs
    asyncio.get_running_loop().call_later(0.05, answers.set)
    await probed(split, canary)
    assert red(split) == set() and canary.outcomes == {"ok": 4}


async def test_a_busy_worker_that_gets_on_is_not_held_to_be_broken(split: World) -> None:
    worker = split.workers["p0"]
    worker.script.before_first = [HANG] * 2
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    split.fleet.heartbeat(worker.change(counters={"engine_steps": 5.0}, waiting=3))
    canary.begin_due()
    await split.settled()
    split.fleet.heartbeat(worker.change(counters={"engine_steps": 9.0}, waiting=3))
    await probed(split, canary)
    assert red(split) == set() and canary.outcomes == {"ok": 2, "unclear": 2}


async def test_steps_alone_excuse_no_worker_that_answers_nothing(split: World) -> None:
    """It computes what it is sent, the canary's prompt too, and reports; but no reply gets back to the router."""
    worker = split.workers["p0"]
    worker.script.before_first = [HANG] * 2
    worker.audit_error = WorkerLost("no answer")
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    split.fleet.heartbeat(worker.change(counters={"engine_steps": 5.0}))
    canary.begin_due()
    await split.settled()
    split.fleet.heartbeat(worker.change(counters={"engine_steps": 6.0}))
    await probed(split, canary)
    assert red(split) == {("p0", "d0"), ("p0", "d1")} and canary.outcomes == {"ok": 2, "failed": 2}


async def cut_off(split: World, name: str) -> None:
    """The canary goes round while the worker reports and answers nothing."""
    split.workers[name].audit_error = WorkerLost("no answer")
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    canary.begin_due()
    await split.settled()
    for session in split.workers[name].sessions:
        split.now += 0.1
        session.deliver([LeaseEvent("gone", 0, Delta(index=0, tokens=(1,), finish=None))])  # and then no more
    later(split)
    await probed(split, canary)


def later(world: World) -> None:
    """A second, in which every worker reports what it holds."""
    world.now += 1.0
    world.beat()


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_what_a_worker_holds_that_reports_but_answers_nothing_goes_elsewhere(split: World, name: str) -> None:
    """A network that drops everything takes a quarter of a minute to say so."""
    worker = split.workers[name]
    worker.script.open = worker.script.before_first = [HANG] * 4
    running = asyncio.create_task(split.tokens(wanted()))
    await split.settled()
    await cut_off(split, name)
    assert await asyncio.wait_for(running, 60) == expected(wanted())
    worker.lose_sessions()
    later(split)


async def test_what_it_holds_stays_where_there_is_no_elsewhere(world: World) -> None:
    world.add("p0", Role.PREFILL)
    world.add("d0", Role.DECODE).script.open = [HANG] * 4
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    await cut_off(world, "d0")
    assert not _entry(world, "d0").suspect and not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    world.workers["d0"].lose_sessions()
    later(world)


async def test_a_worker_whose_tokens_come_holds_what_it_has(split: World) -> None:
    """It grants the canary no lease in time, as it may when it is very busy; but its streams get on."""
    worker = split.workers["d0"]
    lease = await split.fleet.open(_entry(split, "d0").candidate, "r/1", RequestState(request=wanted()))
    worker.script.open = [HANG] * 4
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    canary.begin_due()
    await split.settled()
    later(split)
    worker.sessions[0].deliver([LeaseEvent("r/1", 0, Delta(index=0, tokens=(1,), finish=None))])
    await probed(split, canary)
    assert not lease.failed.done() and red(split) == {("p0", "d0"), ("p1", "d0")}
    split.fleet.close_lease(lease)
    worker.lose_sessions()


def _entry(world: World, name: str) -> RegisteredWorker:
    entry = world.fleet.registry.get(f"{name}-life")
    assert entry is not None
    return entry


@pytest.mark.parametrize("error", [NoRoom("full"), Draining("leaving")], ids=lambda error: type(error).__name__)
async def test_no_room_is_no_break(split: World, error: MillraceError) -> None:
    split.workers["d0"].script.open = [error] * 2
    canary = await probed(split)
    assert red(split) == set() and canary.outcomes == {"ok": 2, "unclear": 2}


@pytest.mark.parametrize("error", [WorkerLost("reset"), InternalError("a bug")], ids=lambda error: type(error).__name__)
async def test_an_error_of_a_worker_is_that_workers(split: World, error: MillraceError) -> None:
    split.workers["p0"].script.before_first = [error] * 2
    await probed(split)
    assert red(split) == {("p0", "d0"), ("p0", "d1")}


async def test_it_closes_the_breaker_that_a_request_has_opened(split: World) -> None:
    split.workers["p0"].script.before_first = [WorkerLost("reset")]
    await split.tokens(wanted())
    split.beat()
    assert red(split) == {("p0", "d0"), ("p0", "d1")}
    await probed(split)
    assert red(split) == set()


async def test_what_it_holds_is_no_leak_and_goes_when_it_is_stopped(split: World) -> None:
    split.workers["p0"].script.after_first = [HANG] * 2
    canary = Canary(split.fleet, INTERVAL, patience=60.0)
    running = asyncio.create_task(canary.run())
    await split.settled()
    audit = (await split.router.audit())[0]
    assert split.fleet.open_leases == 2 and audit.leaked["leases"] == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await split.settled()
    assert split.fleet.open_leases == 0 and split.fleet.probing == 0


async def test_a_silent_worker_is_red_without_being_tried(split: World) -> None:
    split.fleet.suspect("d1-life", WorkerLost("no heartbeat"))
    canary = await probed(split)
    assert red(split) == {("p0", "d1"), ("p1", "d1")} and canary.outcomes == {"ok": 2}


async def test_where_pairs_are_very_many_each_has_its_turn(split: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.canary.WINDOW", 3)
    canary = Canary(split.fleet, INTERVAL, patience=PATIENCE)
    for _ in range(4):
        await probed(split, canary)
    assert canary.outcomes == {"ok": 4}
