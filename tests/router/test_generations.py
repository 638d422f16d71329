"""Generations in the router: no pair of two of them, nothing for a half while there is a whole, and shares by role."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import BreakerConfig
from router.candidate import Candidate
from router.generations import Generation, generations_of, home_of, offer, offer_prefills, pairs_of, ready_workers
from router.link_costs import LinkCosts
from router.policies import POLICIES, make_policy
from router.policy import (
    Demand,
    FleetView,
    able_to_decode,
    able_to_prefill,
    split_only,
    view_for_prefill,
)
from router.request_state import RequestState
from router.trust import Trust, Ways
from serving.errors import Preempted, StaleLease, WorkerLost
from serving.messages import KV_PROTOCOL, Build, Role, Slo, generation_of
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG, LOSE, make_status
from tests.router.test_goodput import COST

OLD, NEW = generation_of("model", KV_PROTOCOL), generation_of("next", KV_PROTOCOL)


def made(name: str, role: Role, pairing: str = "model", kv_protocol: int = KV_PROTOCOL, **fields: Any) -> Candidate:
    known = {"pairing": pairing, "fingerprint": pairing, "kv_protocol": kv_protocol, **fields}
    return Candidate(make_status(name, role, **known))


FLEETS = st.lists(
    st.builds(
        lambda name, role, pairing, protocol, draining, running: made(
            name, role, pairing, protocol, draining=draining, running=running
        ),
        st.sampled_from("abcdefghij"),
        st.sampled_from(list(Role)),
        st.sampled_from(["model", "next"]),
        st.sampled_from([KV_PROTOCOL, KV_PROTOCOL + 1]),
        st.sampled_from([False, False, False, True]),
        st.integers(0, 8),
    ),
    max_size=10,
    unique_by=lambda worker: worker.status.name,
)
BUILDS = st.sampled_from([None, Build("model", "model", OLD), Build("next", "next", NEW)])
DEMANDS = st.builds(
    lambda build, salt, session: Demand(tokens=10, build=build, salt=salt, session=session),
    BUILDS,
    st.integers(0, 2**32 - 1),
    st.sampled_from(["", "one", "two"]),
)


def trusting() -> Trust:
    return Trust(BreakerConfig(), stall=10.0)


def views(demand: Demand, workers: Sequence[Candidate], trust: Trust | None = None) -> list[FleetView]:
    """As the placer makes them: of the home first, then of all that may take the request."""
    trust = trust or trusting()
    able, prefills = able_to_decode(demand, workers), able_to_prefill(demand, workers)
    offered = offer(demand, able, prefills, workers, trust, 0.0)
    whole = FleetView(offered.decodes, offered.prefills, Ways(trust, LinkCosts()))
    return [whole] if offered.home is None else [whole.of_generation(offered.home), whole]


def complete(workers: Sequence[Candidate]) -> set[str]:
    """Generations in which somebody prefills and somebody decodes, counted once more."""
    staying = [worker for worker in workers if not worker.status.draining]
    prefills = {worker.status.generation for worker in staying if worker.status.role is not Role.DECODE}
    return prefills & {worker.status.generation for worker in staying if worker.status.role is not Role.PREFILL}


# ---- what holds for every fleet ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(workers=FLEETS, demand=DEMANDS)
@pytest.mark.parametrize("name", POLICIES)
def test_prefill_and_decode_are_of_one_generation(name: str, workers: list[Candidate], demand: Demand) -> None:
    policy = make_policy(name)
    for view in views(demand, workers):
        decision = policy.choose(demand, view, now=0.0)
        if decision is None or decision.decode is None:
            continue
        assert decision.prefill is None or decision.prefill.generation == decision.decode.generation
        again = view_for_prefill(demand, workers, view.links, decision.decode, set(), begun=demand.build is not None)
        chosen = policy.choose(demand, again, now=0.0)
        assert chosen is None or chosen.prefill is None or chosen.prefill.generation == decision.decode.generation
    assert all(prefill.generation == decode.generation for prefill, decode in pairs_of(workers))


@settings(max_examples=120, deadline=None)
@given(workers=FLEETS, demand=DEMANDS)
def test_a_half_gets_nothing_while_a_whole_could_take_the_request(workers: list[Candidate], demand: Demand) -> None:
    able, prefills = able_to_decode(demand, workers), able_to_prefill(demand, workers)
    whole = complete([*able, *(worker for worker in prefills if worker not in able)])
    whole &= {worker.generation for worker in able} & {worker.generation for worker in prefills}
    for view in views(demand, workers):
        if whole:
            assert view.decode and {worker.generation for worker in view.decode} <= whole
            assert {worker.generation for worker in view.prefill} <= whole
        else:
            assert (list(view.decode), list(view.prefill)) == (able, prefills), "nobody is stranded"
    if whole:
        assert len({worker.generation for worker in views(demand, workers)[0].decode}) == 1


@settings(max_examples=120, deadline=None)
@given(workers=FLEETS)
def test_shares_are_those_of_the_scarcest_role(workers: list[Candidate]) -> None:
    found = ready_workers(workers, trusting(), 0.0)
    whole = complete(workers)
    assert {name for name, generation in found.items() if generation.share} == whole
    assert sum(generation.share for generation in found.values()) == pytest.approx(1.0 if whole else 0.0)
    for one in whole:
        for other in whole:
            scarcer = max(found[one].prefills / found[other].prefills, found[one].decodes / found[other].decodes, 1.0)
            assert found[one].share <= scarcer * found[other].share + 1e-9, "no role of it does more than the other's"


def test_one_new_decode_worker_gets_no_more_than_each_old_one() -> None:
    old = [made(f"p{n}", Role.PREFILL) for n in range(3)] + [made(f"d{n}", Role.DECODE) for n in range(3)]
    new = [made(f"q{n}", Role.PREFILL, "next") for n in range(3)] + [made("e", Role.DECODE, "next")]
    found = ready_workers([*old, *new], trusting(), 0.0)
    assert found == {OLD: Generation(3, 3, 0.75), NEW: Generation(3, 1, 0.25)}
    homes = Counter(home_of(str(number), found) for number in range(4000))
    assert homes[NEW] == pytest.approx(1000, abs=120)


@settings(max_examples=50, deadline=None)
@given(decodes=st.integers(1, 5), key=st.text(max_size=5))
def test_a_growing_share_takes_requests_and_gives_none_away(decodes: int, key: str) -> None:
    old = [made("p", Role.MIXED), made("o", Role.MIXED), made("n", Role.MIXED)]
    homes = []
    for count in (decodes, decodes + 1):
        new = [made(f"e{number}", Role.MIXED, "next") for number in range(count)]
        homes.append(home_of(key, generations_of([*old, *new], [*old, *new])))
    assert homes[0] == homes[1] or homes == [OLD, NEW]


def test_mixed_workers_alone_are_complete_and_a_drained_role_is_missing() -> None:
    workers = [made("m", Role.MIXED), made("p", Role.PREFILL, "next"), made("d", Role.DECODE, "next", draining=True)]
    found = ready_workers(workers, trusting(), 0.0)
    assert found == {OLD: Generation(1, 1, 1.0), NEW: Generation(1, 0)}


def test_a_generation_whose_only_decode_worker_is_not_trusted_is_a_half() -> None:
    workers = [made("m", Role.MIXED), made("p", Role.PREFILL, "next"), made("d", Role.DECODE, "next")]
    trust = trusting()
    for _ in range(20):
        trust.workers.failed("d-life", 0.0)
    assert {worker.status.name for view in views(Demand(tokens=1), workers, trust) for worker in view.decode} == {"m"}
    for _ in range(20):
        trust.workers.failed("m-life", 0.0)
    both = views(Demand(tokens=1), workers, trust)
    assert both[-1].decode, "where nobody is trusted somebody is tried"


@settings(max_examples=80, deadline=None)
@given(workers=FLEETS, demand=DEMANDS, ill=st.sets(st.sampled_from("abcdefghij"), max_size=6))
def test_somebody_is_offered_whoever_is_not_trusted(workers: list[Candidate], demand: Demand, ill: set[str]) -> None:
    trust = trusting()
    for name in ill:
        for _ in range(20):
            trust.workers.failed(f"{name}-life", 0.0)
    able, prefills = able_to_decode(demand, workers), able_to_prefill(demand, workers)
    assert bool(views(demand, workers, trust)[-1].decode) == bool(able)
    well = [worker for worker in workers if worker.status.name not in ill]
    whole = complete([worker for worker in well if worker in able or worker in prefills])
    whole &= {worker.generation for worker in well if worker in able}
    whole &= {worker.generation for worker in well if worker in prefills}
    if whole:
        assert {worker.generation for worker in views(demand, workers, trust)[0].decode} <= whole
    for view in offer_prefills(demand, FleetView((), prefills, Ways(trust, LinkCosts())), workers):
        assert bool(view.prefill) == bool(prefills)


def test_strict_disaggregation_asks_of_each_generation_who_can_do_what() -> None:
    """In one a worker prefills alone, in the other a mixed one does; two mixed ones alone are no such placement."""
    one, other = {"p": Role.PREFILL, "d": Role.DECODE, "n": Role.MIXED}, {"m": Role.MIXED, "e": Role.DECODE}
    workers = [made(name, role) for name, role in one.items()]
    workers += [made(name, role, "next") for name, role in other.items()]
    workers += [made(name, Role.MIXED, "third") for name in "xy"]
    ways = Ways(trusting(), LinkCosts())
    able, prefills = able_to_decode(Demand(tokens=1), workers), able_to_prefill(Demand(tokens=1), workers)
    view = split_only(FleetView(able, prefills, ways), 0.0)
    assert {worker.status.name for worker in view.decode} == {"d", "n", "e"}
    found = {name: view.prefills_for(worker, 0.0) for worker in view.decode for name in worker.status.name}
    assert {name: [each.status.name for each in able] for name, able in found.items()} == {
        "d": ["p"],
        "n": ["p"],
        "e": ["m"],
    }


# ---- what becomes of requests --------------------------------------------------------------------------------------


def a_roll(**config: Any) -> World:
    """An old pair, and a new one of which only the prefill worker is there."""
    world = World(**config)
    world.add("p", Role.PREFILL)
    world.add("d", Role.DECODE)
    world.add("new-p", Role.PREFILL, pairing="next", fingerprint="next")
    return world


def homed(world: World, name: str, begin: int = 0, max_tokens: int = 8) -> Any:
    """A request whose home is that decode worker's generation; of names that count from `begin`."""
    generation = world.workers[name].status.generation
    for number in range(begin, begin + 1000):
        request = wanted(f"r{number}", max_tokens)
        if {each.generation for each in world.placer.look(RequestState(request=request)).view.decode} == {generation}:
            return request
    raise AssertionError(f"no request is for {name}")


async def test_a_new_generation_gets_requests_once_each_of_its_roles_is_ready() -> None:
    world = a_roll()
    for number in range(20):
        request = wanted(str(number), max_tokens=1 + number % 2)
        assert await world.tokens(request) == expected(request)
    assert world.workers["new-p"].orders == [], "neither prompts nor single tokens"
    world.add("new-d", Role.DECODE, pairing="next", fingerprint="next")
    for number in range(40):
        assert await world.tokens(wanted(str(number)))
    assert 8 <= world.workers["new-d"].opened.total() <= 32
    for order in world.workers["new-p"].orders:
        assert order.grant is None or order.grant.address == "local:new-d"
    await world.fleet.close()


async def test_a_full_generation_leaves_its_requests_to_the_other() -> None:
    world = a_roll()
    d = world.add("new-d", Role.DECODE, pairing="next", fingerprint="next", max_seqs=1)
    d.script.decode = [(1, HANG)]
    first, second = homed(world, "new-d"), wanted("second")
    running = asyncio.create_task(world.tokens(first))
    while not d.leases():
        await asyncio.sleep(0)
    for number in range(10):
        assert await world.tokens(wanted(f"more-{number}")) == expected(second)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.fleet.close()


async def test_before_its_first_token_a_request_may_change_its_generation() -> None:
    world = a_roll()
    world.add("new-d", Role.DECODE, pairing="next", fingerprint="next")
    request = homed(world, "new-d")
    world.workers["new-p"].script.before_first = [WorkerLost("killed")]
    world.workers["new-p"].closing.set()
    assert await world.tokens(request) == expected(request)
    assert world.workers["d"].opened.total() == 1
    await world.fleet.close()


@pytest.mark.parametrize("fingerprint", ["model", "next"])
async def test_a_text_moves_to_another_generation_of_its_own_fingerprint_alone(fingerprint: str) -> None:
    """As when the last old worker leaves: of a new protocol the weights are the same, of a new model they are not."""
    world = World()
    world.add("p", Role.PREFILL)
    d = world.add("d", Role.DECODE)
    d.script.decode = [(2, LOSE)]
    d.script.connect = [None, *[WorkerLost("killed")] * 1000]
    running = asyncio.create_task(world.tokens(wanted()))
    while not world.seen.replacements:
        await asyncio.sleep(0)
    later = {"pairing": fingerprint, "fingerprint": fingerprint, "kv_protocol": KV_PROTOCOL + 1}
    new_p, new_d = (world.add(name, role, **later) for name, role in (("q", Role.PREFILL), ("e", Role.DECODE)))
    if fingerprint == "model":
        assert await running == expected(wanted())
        assert new_d.opened.total() == 1 and new_p.orders
    else:
        await world.settled()
        assert not running.done() and not new_d.opened
        d.script.connect = []
        world.beat()
        assert await running == expected(wanted())
    await world.fleet.close()


async def test_requests_wait_where_the_only_decode_worker_is_killed_while_it_drains() -> None:
    world = World(patience=60.0)
    world.add("p", Role.PREFILL)
    d = world.add("d", Role.DECODE)
    d.script.decode = [(2, HANG)]
    begun = asyncio.create_task(world.tokens(wanted("begun")))
    while len(world.seen.firsts) < 1:
        await asyncio.sleep(0)
    world.fleet.heartbeat(d.change(draining=True))
    fresh = asyncio.create_task(world.tokens(wanted("fresh")))
    await world.settled()
    d.script.connect = [WorkerLost("killed")] * 1000
    d.lose_sessions()
    world.let_pass(10.0)
    await world.settled()
    assert not begun.done() and not fresh.done() and not begun.cancelled()
    world.beat()
    world.add("next", Role.DECODE)
    assert [await begun, await fresh] == [expected(wanted())] * 2
    await world.fleet.close()


async def test_requests_go_on_while_a_generation_has_lost_the_trust_of_its_only_prefill_worker() -> None:
    world = a_roll()
    world.add("new-d", Role.DECODE, pairing="next", fingerprint="next")
    for _ in range(20):
        world.fleet.breakers.failed(world.workers["new-p"].status.instance, world.now)
    for number in range(10):
        request = wanted(str(number), max_tokens=1 + number % 2)
        assert await world.tokens(request) == expected(request)
    assert not world.workers["new-d"].opened and not world.workers["new-p"].orders
    await world.fleet.close()


async def test_a_request_that_fails_in_its_generation_begins_in_another() -> None:
    """Whatever it fails of: no breaker opens for this."""
    world = a_roll()
    d = world.add("new-d", Role.DECODE, pairing="next", fingerprint="next")
    request = homed(world, "new-d")
    world.workers["new-p"].script.before_first = [StaleLease("again and again")] * 1000
    assert await world.tokens(request) == expected(request)
    assert len(world.seen.replacements) == 2 and d.opened.total() <= 2
    await world.fleet.close()


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_request_that_is_late_in_its_generation_goes_to_another(max_tokens: int) -> None:
    """As when a new generation is small and has taken long prompts: its class would have the request refused."""
    world = World(policy="goodput")
    for name, role, pairing, seconds in (
        ("p", Role.PREFILL, "model", 0.0),
        ("d", Role.DECODE, "model", 0.0),
        ("new-p", Role.PREFILL, "next", 100.0),
        ("new-d", Role.DECODE, "next", 0.0),
    ):
        fields = {"pairing": pairing, "fingerprint": pairing, "waiting_tokens": int(1000 * seconds)}
        world.add(name, role, step_cost=COST, waiting_seconds=seconds, max_batched_tokens=512, **fields)
    for number in range(10):
        request = wanted(str(number), max_tokens, service_class="interactive", slo=Slo(ttft_ms=1000.0))
        assert await world.tokens(request) == expected(request)
    assert not world.workers["new-p"].orders
    await world.fleet.close()


async def test_a_text_that_outlasts_the_prefill_workers_of_its_model_is_computed_by_its_decode_worker() -> None:
    """The last of them has left, the next model serves, and the text's blocks went to another request."""
    world = World()
    p, d = world.add("p", Role.PREFILL), world.add("d", Role.DECODE)
    for name, role in (("new-p", Role.PREFILL), ("new-d", Role.DECODE)):
        world.add(name, role, pairing="next", fingerprint="next")
    d.script.decode = [(3, Preempted("blocks ran out"))]
    request = homed(world, "d")
    running = asyncio.create_task(world.tokens(request))
    while not p.orders:
        await asyncio.sleep(0)
    world.fleet.heartbeat(p.change(draining=True))
    assert await running == expected(request)
    assert len(p.orders) == len(d.orders) == 1
    await world.fleet.close()


async def test_requests_that_a_restarting_worker_drops_are_not_taken_for_what_breaks_it() -> None:
    """A generation that flaps: its only prefill worker dies of each second prompt that it is given, and comes back."""
    world = a_roll()
    p = world.workers["new-p"]
    world.add("new-d", Role.DECODE, pairing="next", fingerprint="next")
    for life in range(6):
        request = homed(world, "new-d", begin=life * 100, max_tokens=1 + life % 3)
        p.script.before_first = [WorkerLost("killed")] * 2
        running = asyncio.create_task(world.tokens(request))
        while len(world.seen.replacements) <= life:
            await asyncio.sleep(0)
        world.fleet.heartbeat(p.change(instance=f"life-{life}"))
        assert await running == expected(request)
        world.now += 1.0
        p.script.before_first = []
    assert len(world.seen.replacements) == 6
    await world.fleet.close()
