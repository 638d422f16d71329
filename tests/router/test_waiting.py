"""Requests that find no place: whom they wait behind, whom they ask, and what becomes of those that are late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.lease_room import MOST_ASKED, MOST_REMEMBERED, FullWorkers
from router.policy import Decision, Demand, FleetView
from router.request_state import RequestState
from serving.errors import NoRoom, Overloaded, Unavailable
from serving.messages import Role, Slo
from serving.service_class import SERVICE_CLASSES
from tests.router.conftest import World, expected, wanted
from tests.router.costed import COST
from tests.router.scripted import HANG
from tests.router.test_degrade import classed, late, rest

pytestmark = pytest.mark.usefixtures("ties_by_name")


async def ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- one look for a change -----------------------------------------------------------------------------------------


async def test_a_change_costs_those_that_wait_for_a_prefill_worker_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.add("p", Role.PREFILL)
    world.add("d", Role.DECODE, max_seqs=100)
    world.fleet.registry.leaves("p-life")
    requests = [wanted(str(number)) for number in range(40)]
    running = [asyncio.create_task(world.tokens(request)) for request in requests]
    while world.placer.prefill_queue.waiting < 40:
        await asyncio.sleep(0.01)
    await rest()  # those that came together have all looked once
    assert world.fleet.open_leases == 40, "all hold their leases"
    looks: list[str] = []
    look = world.placer._decide_prefill

    def counted(state: RequestState, *others: Any) -> Any:
        looks.append(state.request.request_id)
        return look(state, *others)

    monkeypatch.setattr(world.placer, "_decide_prefill", counted)
    for _ in range(10):
        world.fleet.heartbeat(world.workers["d"].status)
        await world.settled()
    assert len(looks) <= 15, "not one of each that waits, for each change"
    world.beat()  # the prefill worker is back
    assert await asyncio.gather(*running) == [expected(request) for request in requests]
    assert world.held() == {}
    await world.fleet.close()


async def test_a_lease_that_is_lost_ends_the_wait_for_a_prefill_worker() -> None:
    world = World()
    world.add("p", Role.PREFILL)
    world.fleet.registry.leaves("p-life")
    d = world.add("d", Role.DECODE)
    running = asyncio.create_task(world.tokens(wanted()))
    await asyncio.sleep(0.3)
    d.lose_sessions()
    await world.settled()
    assert len(world.seen.replacements) == 1
    world.beat()
    assert await running == expected(wanted())
    await world.fleet.close()


# ---- full workers --------------------------------------------------------------------------------------------------


def full_world(count: int, code: str | None = None) -> World:
    """Workers that refuse every lease, although they look as if they had room."""
    world = World(patience=300.0)
    for number in range(count):
        world.add(f"w{number:03}").script.open = [NoRoom("full", code=code)] * 10_000
    return world


def asked(world: World) -> int:
    return sum(sum(worker.opened.values()) for worker in world.workers.values())


@pytest.mark.usefixtures("looks_by_hand")
@pytest.mark.parametrize("code", [None, "blocks", "tpot"])
async def test_a_request_that_no_worker_has_room_for_asks_a_few_of_them_and_each_once_a_heartbeat(
    code: str | None,
) -> None:
    world = full_world(100, code)
    running = [asyncio.create_task(world.tokens(replace(wanted(), slo=Slo(tpot_ms=50.0))))]
    await rest()
    assert asked(world) == MOST_ASKED
    for _ in range(20):
        world.fleet.notify()
        await rest()
    assert asked(world) == 100, "nobody was asked twice, as nobody has said anything since"
    world.now += 1.0
    world.beat()
    for _ in range(20):
        world.fleet.notify()
        await rest()
    assert asked(world) == 200
    await ended(running)
    await world.settled()
    await world.fleet.close()


@pytest.mark.usefixtures("looks_by_hand")
async def test_a_few_workers_are_asked_at_every_look() -> None:
    world = full_world(4)
    running = [asyncio.create_task(world.tokens(wanted()))]
    await rest()
    world.fleet.notify()
    await rest()
    assert asked(world) == 8
    await ended(running)
    await world.settled()
    await world.fleet.close()


async def test_the_one_worker_with_room_is_found_among_many() -> None:
    world = full_world(60)
    world.workers["w059"].script.open = []
    running = asyncio.create_task(world.tokens(wanted()))
    while not running.done():
        world.fleet.notify()
        await world.settled()
    assert await running == expected(wanted())
    await world.fleet.close()


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.floats(0, 3), st.sampled_from([None, 0, 1]), st.integers(1, 9)), max_size=30
    ),
    st.sampled_from("ab"),
    st.floats(0, 3),
    st.integers(0, 1),
    st.integers(1, 9),
)
def test_who_refuses_has_refused_as_much_since_it_was_heard(
    events: list[tuple[str, float, int | None, int]], instance: str, heard: float, bin_: int, tokens: int
) -> None:
    workers = FullWorkers()
    for event in events:
        workers.refused(*event)
    newest = [event[1] for event in events if event[0] == instance]
    told = []
    for who, at, wanting, refused in events:
        if who == instance:
            told = [known for known in told if known[0] == at]
            told.append((at, wanting, refused))
    reason = [1 for at, wanting, few in told if at == heard and wanting in (None, bin_) and few <= tokens]
    assert workers.refuses(instance, heard, bin_, tokens) == bool(newest and reason)
    workers.forget(instance)
    assert not workers.refuses(instance, heard, bin_, tokens)


def test_workers_that_come_and_go_take_bounded_memory() -> None:
    workers = FullWorkers()
    for number in range(3 * MOST_REMEMBERED):
        workers.refused(str(number), 0.0, None, 1)
    assert len(workers._refused) == MOST_REMEMBERED
    assert workers.refuses(str(3 * MOST_REMEMBERED - 1), 0.0, None, 1)


# ---- fair to clients -----------------------------------------------------------------------------------------------


async def test_who_pays_is_who_shares_fairly_whatever_their_cache_salts() -> None:
    """Two API keys; one of them comes with a cache salt of its own for each request."""
    world = World()
    world.add("a", max_seqs=1)
    requests = [wanted("first")]
    requests += [replace(wanted(f"greedy{n}", tenant=f"salt{n}"), client="greedy") for n in range(6)]
    requests += [replace(wanted(f"modest{n}"), client="modest") for n in range(3)]
    running = [asyncio.create_task(world.tokens(request)) for request in requests]
    await asyncio.wait_for(asyncio.gather(*running), 60)
    order = [name[:6] for name, *_ in world.seen.endings]
    assert order[1:7].count("modest") == 3, order
    await world.fleet.close()


# ---- single tokens -------------------------------------------------------------------------------------------------


async def test_a_single_token_that_comes_late_everywhere_is_refused_as_any_other_request() -> None:
    world = late()
    with pytest.raises(Overloaded) as refused:
        await world.tokens(classed("r", SERVICE_CLASSES["interactive"], max_tokens=1))
    assert refused.value.code == "slo" and refused.value.retry_after is not None
    assert not world.workers["a"].orders and world.held() == {}
    await world.fleet.close()


async def test_a_single_token_of_a_class_with_a_backlog_waits_at_the_router() -> None:
    world = late()
    batch = asyncio.create_task(world.tokens(classed("r", SERVICE_CLASSES["batch"], max_tokens=1)))
    await world.settled()
    assert world.placer.admission.waiting == 1 and not world.workers["a"].orders
    world.fleet.heartbeat(world.workers["a"].change(waiting_seconds=0.2, waiting_tokens=200))
    assert len(await batch) == 1
    await world.settled()
    assert world.held() == {}
    await world.fleet.close()


async def test_a_single_token_without_a_worker_that_prefills_is_told_so() -> None:
    world = World(patience=0.05)
    world.add("d", Role.DECODE)
    with pytest.raises(Unavailable, match="no prefill worker"):
        await world.tokens(wanted(max_tokens=1))
    assert world.held() == {}
    await world.fleet.close()


@pytest.mark.usefixtures("looks_by_hand")
async def test_while_every_worker_is_full_nobody_is_placed_but_those_whose_class_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A choice among hundreds of full workers is what a look costs; it is made where a refusal may come of it."""
    world = World(policy="goodput", patience=300.0, classes=dict(SERVICE_CLASSES), max_waiting=10)
    world.add("a", max_seqs=1).script.decode = [(2, HANG)]
    running = [asyncio.create_task(world.tokens(wanted("first")))]
    await rest()
    chosen: list[str] = []
    choose = world.placer.policy.choose

    def counted(demand: Demand, view: FleetView, now: float) -> Decision | None:
        chosen.append(str(demand.weight))
        return choose(demand, view, now)

    monkeypatch.setattr(world.placer.policy, "choose", counted)
    running.append(asyncio.create_task(world.tokens(wanted("second"))))
    for _ in range(5):
        world.fleet.notify()
        await rest()
    assert chosen == [] and world.placer.admission.waiting == 1
    running.append(asyncio.create_task(world.tokens(classed("third", SERVICE_CLASSES["interactive"]))))
    await rest()
    assert set(chosen) == {str(SERVICE_CLASSES["interactive"].weight)}
    await ended(running)
    await world.fleet.close()


async def test_it_waits_for_a_worker_whose_steps_are_full_rather_than_go_where_it_would_be_late() -> None:
    """Until it would be late there too."""
    world = World(policy="goodput")
    idle, behind = (
        world.add(name, step_cost=COST, max_batched_tokens=512, waiting_seconds=waits)
        for name, waits in (("idle", 0.0), ("behind", 5.0))
    )
    idle.script.open = [NoRoom("full steps", code="tpot")] * 4
    slo = Slo(ttft_ms=2000.0, tpot_ms=100.0)
    running = asyncio.create_task(world.tokens(replace(wanted("1"), slo=slo)))
    for _ in range(3):
        await world.settled()
        assert not behind.opened and not running.done()
        world.fleet.notify()
    world.now += 3.0
    world.beat()
    assert await running == expected(wanted("1"))
    await world.fleet.close()


@pytest.mark.parametrize("slo", [Slo(tpot_ms=100.0), Slo()])
async def test_one_that_is_due_at_no_time_takes_what_there_is(slo: Slo) -> None:
    world = World(policy="goodput")
    full, other = (world.add(name, step_cost=COST, max_batched_tokens=512) for name in ("full", "other"))
    full.script.open = other.script.open = [NoRoom("full steps", code="tpot")]
    request = replace(wanted("1"), slo=slo)
    assert await world.tokens(request) == expected(request)
    await world.fleet.close()


async def test_prompts_whose_first_tokens_come_in_time_are_likely_to_go_on_coming() -> None:
    world = World(policy="goodput")
    world.add("w", step_cost=COST)
    assert world.fleet.candidates()[0].arrivals == ()
    await world.tokens(replace(wanted("1"), slo=Slo(ttft_ms=1000.0), priority=3))
    await world.tokens(replace(wanted("2"), slo=Slo(ttft_ms=-1.0)))
    await world.tokens(replace(wanted("3"), slo=Slo()))
    world.beat()
    (kind,) = world.fleet.candidates()[0].arrivals
    assert (kind.priority, kind.limit) == (3, 1.0), "of the others one was late, and one due at no time"
    assert kind.rate > 0.0 and kind.seconds > 0.0
    await world.fleet.close()
