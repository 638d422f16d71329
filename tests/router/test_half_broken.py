"""Workers and links that are half broken cost time and are gone around; no request ends that others could serve."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import BreakerState
from serving.errors import CorruptChunk, Draining, InvalidRequest, MillraceError, Preempted, Unavailable, WorkerLost
from serving.messages import PROTOCOL, Role
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG, ScriptedWorker

pytestmark = pytest.mark.usefixtures("ties_by_name")


def tries(world: World) -> Counter[tuple[str, str]]:
    """Prefills by (prefill worker, decode worker)."""
    return Counter(
        (worker.status.name, order.grant.address.removeprefix("local:"))
        for worker in world.workers.values()
        for order in worker.orders
        if order.grant is not None
    )


def cut(world: World, prefill: str, decode: str) -> None:
    world.workers[prefill].unreachable.add(world.workers[decode].status.address)


# ---- links ---------------------------------------------------------------------------------------------------------


async def test_a_broken_link_is_gone_around_after_one_try(split: World) -> None:
    cut(split, "p0", "d0")
    assert await split.tokens(wanted()) == expected(wanted())
    assert tries(split) == {("p0", "d0"): 1, ("p1", "d0"): 1}
    assert not split.fleet.links.allows("p0-life", "d0-life", split.now)
    assert split.fleet.links.allows("p0-life", "d1-life", split.now), "neither end is to blame"


async def test_the_requests_after_it_do_not_try_the_link(split: World) -> None:
    cut(split, "p0", "d0")
    for number in range(20):
        assert await split.tokens(wanted(str(number))) == expected(wanted(str(number)))
    assert tries(split)["p0", "d0"] == 1


async def test_a_decode_worker_that_no_prefill_worker_reaches_is_left_for_another(split: World) -> None:
    cut(split, "p0", "d0")
    cut(split, "p1", "d0")
    assert await split.tokens(wanted()) == expected(wanted())
    assert tries(split) == {("p0", "d0"): 1, ("p1", "d0"): 1, ("p0", "d1"): 1}
    assert await split.tokens(wanted("2")) == expected(wanted("2"))
    assert tries(split)["p0", "d1"] == 2


async def test_a_link_is_tried_again_by_one_request_when_its_pause_is_over(split: World) -> None:
    cut(split, "p0", "d0")
    await split.tokens(wanted("1"))
    split.now += 1.0
    await split.tokens(wanted("2"))
    assert tries(split)["p0", "d0"] == 2 and split.fleet.links.state("p0-life", "d0-life") is BreakerState.OPEN
    split.workers["p0"].unreachable.clear()
    split.now += 3.0
    await split.tokens(wanted("3"))
    assert tries(split)["p0", "d0"] == 3 and split.fleet.links.state("p0-life", "d0-life") is BreakerState.CLOSED


async def test_a_broken_link_is_tried_when_nothing_else_is_left() -> None:
    world = World()
    world.add("p0", Role.PREFILL)
    world.add("d0", Role.DECODE)
    cut(world, "p0", "d0")
    running = asyncio.create_task(world.tokens(wanted()))
    while not world.seen.replacements:
        await asyncio.sleep(0)
    world.workers["p0"].unreachable.clear()
    assert await running == expected(wanted())
    assert tries(world)["p0", "d0"] == 2
    await world.fleet.close()


async def test_where_all_links_are_broken_they_are_tried_in_turn() -> None:
    world = World()
    for name in ("p0", "p1"):
        world.add(name, Role.PREFILL)
    world.add("d0", Role.DECODE)
    cut(world, "p0", "d0")
    cut(world, "p1", "d0")
    with pytest.raises(Unavailable, match="gave up after 9"):
        running = asyncio.create_task(world.tokens(wanted(max_tokens=60)))
        while not running.done():
            world.beat()
            await asyncio.sleep(0)
        await running
    assert abs(tries(world)["p0", "d0"] - tries(world)["p1", "d0"]) <= 1
    await world.fleet.close()


@settings(max_examples=60, deadline=None)
@given(broken=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8), count=st.integers(1, 8))
def test_whatever_links_are_broken_a_whole_one_is_found(broken: set[tuple[int, int]], count: int) -> None:
    """Of nine ways between three and three workers one is whole: every request finds it, and all know after one."""

    async def play() -> None:
        world = World()
        for number in range(3):
            world.add(f"p{number}", Role.PREFILL)
            world.add(f"d{number}", Role.DECODE)
        for prefill, decode in broken:
            cut(world, f"p{prefill}", f"d{decode}")
        requests = [wanted(str(number), max_tokens=30) for number in range(count)]
        running = asyncio.gather(*(world.tokens(request) for request in requests))
        while not running.done():
            world.beat()
            await asyncio.sleep(0)
        assert await running == [expected(request) for request in requests]
        before = len(world.seen.replacements)
        found = {pair for pair in tries(world) if (int(pair[0][1]), int(pair[1][1])) in broken}
        again = wanted("again", max_tokens=30)
        assert await world.tokens(again) == expected(again)
        assert len(world.seen.replacements) - before <= len(broken) - len(found)
        await world.settled()
        assert world.held() == {}
        await world.fleet.close()

    asyncio.run(play())


async def test_harmed_kv_opens_the_link(split: World) -> None:
    split.workers["p0"].script.after_first = [CorruptChunk("harmed", code="digest")]
    await split.tokens(wanted())
    assert split.fleet.links.state("p0-life", "d0-life") is BreakerState.OPEN


@pytest.mark.parametrize(
    "error", [InvalidRequest("no", param="x"), Preempted("x"), Draining("x")], ids=lambda error: type(error).__name__
)
async def test_what_clients_and_plans_do_opens_no_breaker(split: World, error: MillraceError) -> None:
    split.workers["p0"].script.after_first = [error]
    split.workers["d0"].script.decode = [(2, error)]
    await asyncio.gather(split.tokens(wanted()), return_exceptions=True)
    assert len(split.fleet.breakers) == 0 and len(split.fleet.links.breakers) == 0


# ---- workers -------------------------------------------------------------------------------------------------------


async def test_one_heartbeat_does_not_restore_trust(split: World) -> None:
    split.workers["p0"].script.before_first = [WorkerLost("reset")]
    await split.tokens(wanted("1"))
    split.beat()
    for number in range(2, 6):
        await split.tokens(wanted(str(number)))
    assert len(split.workers["p0"].orders) == 1
    split.now += 1.0
    split.beat()
    await asyncio.gather(*(split.tokens(wanted(str(number), max_tokens=40)) for number in range(6, 10)))
    assert len(split.workers["p0"].orders) >= 2, "its trial went well, so it is one of them again"
    assert split.fleet.breakers.state("p0-life") is BreakerState.CLOSED


async def test_a_decode_worker_that_failed_gets_one_request_to_begin_with(split: World) -> None:
    split.workers["d0"].script.connect = [WorkerLost("refused")]
    await split.tokens(wanted("1"))
    split.now += 1.0
    split.beat()
    split.workers["d0"].script.open = [HANG]
    running = [asyncio.create_task(split.tokens(wanted(str(number)))) for number in range(2, 6)]
    await split.settled()
    assert sum(split.workers["d0"].opened.values()) == 1
    split.fleet.suspect("d0-life", WorkerLost("silent"))
    assert all(isinstance(tokens, list) for tokens in await asyncio.gather(*running))


async def test_the_only_worker_is_tried_as_soon_as_it_is_heard_of(world: World) -> None:
    worker = world.add("m")
    worker.script.before_first = [WorkerLost("reset")] * 3
    running = asyncio.create_task(world.tokens(wanted()))
    while not running.done():
        world.beat()
        await asyncio.sleep(0)
    assert await running == expected(wanted())


async def test_a_lost_lease_is_held_against_its_worker(split: World) -> None:
    split.workers["d0"].script.decode = [(2, WorkerLost("the engine died"))]
    await split.tokens(wanted())
    assert split.fleet.breakers.state("d0-life") is BreakerState.OPEN


async def test_an_order_that_cannot_be_sent_makes_no_worker_suspect(split: World) -> None:
    """A field that does not fit its wire form: one request made nine workers suspect, and others lost their leases."""
    for name in ("p0", "p1"):
        split.workers[name].script.before_first = [ValueError("value out of range")] * 20
    with pytest.raises(Unavailable, match="value out of range"):
        await split.tokens(wanted(max_tokens=20))
    assert not any(entry.suspect for entry in split.fleet.registry.workers.values())
    assert len(split.fleet.breakers) == 0


# ---- retries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Draining("x"), Preempted("x")], ids=lambda error: type(error).__name__)
async def test_planned_moves_are_no_failures(split: World, error: MillraceError) -> None:
    """The ninth drain of a rolling restart ended a healthy stream."""
    for name in ("d0", "d1"):
        split.workers[name].script.decode = [(1, error)] * 20
    request = wanted(max_tokens=60)
    assert await split.tokens(request) == expected(request)
    assert (
        len(split.seen.replacements) == 40 - sum(len(split.workers[name].script.decode) for name in ("d0", "d1"))
        and len(split.seen.replacements) > split.fleet.config.max_failures
    )


async def test_a_text_that_gets_on_may_lose_any_number_of_workers(split: World) -> None:
    for name in ("d0", "d1"):
        split.workers[name].script.decode = [(2, WorkerLost("x"))] * 15
    request = wanted(max_tokens=60)
    running = asyncio.create_task(split.tokens(request))
    while not running.done():
        split.beat()
        await asyncio.sleep(0)
    assert await running == expected(request)
    assert len(split.seen.replacements) > 2 * split.fleet.config.max_failures


async def test_first_tokens_alone_are_no_progress(split: World) -> None:
    """Each try of a handoff that fails draws a token: a text must not be written by prefills."""
    for prefill in ("p0", "p1"):
        for decode in ("d0", "d1"):
            cut(split, prefill, decode)
    running = asyncio.create_task(split.tokens(wanted(max_tokens=60)))
    with pytest.raises(Unavailable, match="gave up after 9"):
        while not running.done():
            split.beat()
            await asyncio.sleep(0)
        await running
    assert sum(tries(split).values()) == 9


async def test_tries_do_not_multiply() -> None:
    """Prefills into a lease and leases count together: not eight of one for each of the other."""
    world = World()
    for name in ("a", "b"):
        world.add(name).script.before_first = [WorkerLost("x"), CorruptChunk("x")] * 50
    running = asyncio.create_task(world.tokens(wanted()))
    with pytest.raises(Unavailable, match="gave up after 9"):
        while not running.done():
            world.beat()
            await asyncio.sleep(0)
        await running
    assert sum(len(worker.orders) for worker in world.workers.values()) == 9
    await world.fleet.close()


# ---- stuck engines -------------------------------------------------------------------------------------------------


def stuck(world: World, worker: ScriptedWorker, seconds: float = 30.0) -> None:
    world.fleet.heartbeat(worker.change(stalled_seconds=seconds, running=1))


async def test_a_worker_whose_engine_is_stuck_is_not_ranked_until_it_moves(world: World) -> None:
    a, b = world.add("a"), world.add("b", running=5)
    stuck(world, a)
    assert await world.tokens(wanted("1")) == expected(wanted("1"))
    assert not a.opened and b.opened
    world.fleet.heartbeat(a.change(stalled_seconds=0.0, running=0))
    await world.tokens(wanted("2"))
    assert a.opened


async def test_what_a_stuck_worker_holds_goes_elsewhere(world: World) -> None:
    a = world.add("a")
    a.script.decode = [(2, HANG)]
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    b = world.add("b")
    stuck(world, a)
    assert await asyncio.wait_for(running, 60) == expected(wanted())
    assert b.opened


async def test_a_stuck_prefill_worker_is_gone_around(split: World) -> None:
    split.workers["p0"].script.before_first = [HANG]
    running = asyncio.create_task(split.tokens(wanted()))
    await split.settled()
    stuck(split, split.workers["p0"])
    assert await asyncio.wait_for(running, 60) == expected(wanted())


async def test_what_the_only_worker_holds_stays_there(world: World) -> None:
    """It may only be slow, and there is nobody else."""
    a = world.add("a")
    a.script.decode = [(2, HANG)]
    running = asyncio.create_task(world.tokens(wanted()))
    await world.settled()
    stuck(world, a)
    await world.settled()
    assert a.leases() and not world.seen.replacements
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# ---- pauses of the router, and versions ----------------------------------------------------------------------------


async def test_a_router_that_was_paused_hears_its_workers_before_it_judges(world: World) -> None:
    worker = world.add("a")
    world.fleet.expire()
    running = asyncio.create_task(world.tokens(wanted(max_tokens=40)))
    await asyncio.sleep(0)
    world.now += 60.0
    world.fleet.expire()
    assert await running == expected(wanted(max_tokens=40)) and not world.seen.replacements
    world.let_pass(4.0)
    assert len(world.fleet.candidates()) == 1
    world.let_pass(2.0)
    assert world.fleet.candidates() == [], "a full silence later it is judged"
    assert worker.link_closed == 0


async def test_the_first_heartbeat_after_a_pause_gives_the_others_time_too(world: World) -> None:
    world.add("a")
    b = world.add("b")
    world.now += 60.0
    world.fleet.heartbeat(b.status)
    world.fleet.expire()
    assert len(world.fleet.candidates()) == 2


async def test_a_router_that_has_yet_to_listen_tells_of_no_pause(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.now += 60.0  # while the rest of it was made
    world.fleet.expire()
    assert "has not listened" not in caplog.text
    world.now += 60.0
    world.fleet.expire()
    assert "has not listened for 60.0 s" in caplog.text


@pytest.mark.parametrize("protocol", [0, PROTOCOL - 2, PROTOCOL + 1])
async def test_a_worker_of_another_protocol_is_refused_and_counted(world: World, protocol: int) -> None:
    with pytest.raises(InvalidRequest, match="protocol") as refused:
        world.add("old", protocol=protocol)
    assert refused.value.code == "protocol" and str(protocol) in refused.value.message
    assert world.fleet.candidates() == [] and world.fleet.protocols_refused == 1
    del world.workers["old"]


async def test_a_worker_of_the_protocol_before_is_taken(world: World) -> None:
    world.add("old", protocol=PROTOCOL - 1)
    assert await world.tokens(wanted()) == expected(wanted()) and world.fleet.protocols_refused == 0


async def test_a_status_is_as_old_as_its_echo_says(world: World) -> None:
    worker = world.add("a")
    entry = world.fleet.registry.get("a-life")
    assert entry is not None and entry.made_at == world.now, "in process it is made now"
    world.fleet.heartbeat(worker.status, made_at=world.now - 0.3)
    assert entry.made_at == world.now - 0.3
    world.now += 100.0
    world.fleet.heartbeat(worker.status, made_at=world.now - 20.0)
    assert entry.made_at == world.now - 20.0, "it was long on its way: what was sent meanwhile is not in it"
    for nonsense in (world.now + 1000.0, world.now - 1000.0):
        world.fleet.heartbeat(worker.status, made_at=nonsense)
        assert entry.made_at == world.now, "an echo of another clock"
