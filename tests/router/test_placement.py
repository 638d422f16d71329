"""Placement by prefixes: the router's own placements and the workers' KV events lead a request to its cached blocks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvcache.blocks.events import KVEventLog
from kvcache.blocks.prefix import extend_keys, root_key
from router.block_keys import block_keys
from router.request_state import RequestState
from serving.errors import DeadlineExceeded, NoRoom, Overloaded
from serving.messages import Pooling, Request, Role, Slo
from serving.service_class import SERVICE_CLASSES, ServiceClass
from serving.step_cost import StepCost
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG, ScriptedWorker, make_status

pytestmark = pytest.mark.usefixtures("ties_by_name")

SHARED = tuple(range(3, 3 + 64))  # four blocks of 16


def knowing(**config: object) -> World:
    return World(policy="prefix_aware", **config)


def sent(worker: ScriptedWorker) -> list[str]:
    return [order.order.request.request_id for order in worker.orders]


async def test_requests_of_one_prefix_follow_the_first_and_others_spread() -> None:
    world = knowing()
    a, b = world.add("a"), world.add("b")
    await world.tokens(wanted("1", prompt=(*SHARED, 7)))
    assert sent(a) == ["1"]
    await world.tokens(wanted("2", prompt=(*SHARED, 8, 9)))
    assert sent(a) == ["1", "2"], "its prefix was placed there"
    other = wanted("3", prompt=tuple(range(100, 170)))
    a.change(waiting_tokens=1)
    world.beat()
    assert await world.tokens(other) == expected(other)
    assert sent(b) == ["3"], "nothing of it is cached, so the shorter queue wins"
    await world.fleet.close()


async def test_what_a_worker_says_it_holds_counts_and_what_it_has_lost_does_not() -> None:
    world = knowing()
    a, b = world.add("a"), world.add("b", waiting_tokens=20)
    log, request = KVEventLog(), wanted("1", prompt=(*SHARED, 7))
    keys: list[bytes] = []
    extend_keys(keys, root_key("model"), SHARED, 16)
    for key in keys:
        log.stored(key)
    since = world.fleet.kv_events_since(b.status.instance)
    assert since == 0
    world.fleet.heartbeat(b.status, log.since(since))
    await world.tokens(request)
    assert sent(b) == ["1"] and not sent(a)
    for key in keys:
        log.removed(key)
    since = world.fleet.kv_events_since(b.status.instance)
    assert since == 4
    world.fleet.heartbeat(b.status, log.since(since))
    await world.tokens(wanted("2", prompt=(*SHARED, 7)))
    assert sent(a) == ["2"]
    await world.fleet.close()


async def test_prefill_workers_are_chosen_by_prefix_too() -> None:
    world = knowing()
    p, q = world.add("p", Role.PREFILL), world.add("q", Role.PREFILL)
    world.add("d", Role.DECODE)
    await world.tokens(wanted("1", prompt=(*SHARED, 7)))
    await world.tokens(wanted("2", prompt=(*SHARED, 9, 9)))
    assert sent(p) == ["1", "2"] and not sent(q)
    await world.fleet.close()


async def test_cached_tokens_are_no_load() -> None:
    """Of two prompts at one worker the second is mostly cached: only the rest of it counts while it is computed."""
    world = knowing()
    a = world.add("a")
    a.script.before_first = ["go", "hang"]
    await world.tokens(wanted("1", prompt=(*SHARED, 7)))
    running = asyncio.create_task(world.tokens(wanted("2", prompt=(*SHARED, 8))))
    await world.settled()
    entry = world.fleet.registry.get(a.status.instance)
    assert entry is not None and entry.newer.prompt_tokens == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.settled()
    assert world.held() == {}
    await world.fleet.close()


async def test_other_policies_ask_for_no_events() -> None:
    world = World()
    world.add("a")
    assert world.fleet.prefixes is None and world.fleet.kv_events_since("a-life") is None
    await world.fleet.close()


def test_block_keys_are_those_of_the_worker() -> None:
    """Tenant, rope variant, fingerprint and block size are all part of them; one token is always left to compute."""
    state = RequestState(request=wanted(prompt=SHARED, max_tokens=8, tenant="t"))
    status = make_status(long_rope_after=70)
    known: list[bytes] = []
    extend_keys(known, root_key("model", "t", long_rope=True), SHARED[:48], 16)
    assert block_keys(state, status) == known
    state.generated += [5, 6]
    extend_keys(known, root_key("model", "t", long_rope=True), SHARED, 16)
    assert block_keys(state, status) == known, "what has been generated counts as well"
    smaller: list[bytes] = []
    extend_keys(smaller, root_key("model", "t", long_rope=True), SHARED, 8)
    assert block_keys(state, make_status(long_rope_after=70, block_size=8)) == smaller
    echoed = RequestState(request=wanted(prompt=SHARED, prompt_logprobs=1))
    assert block_keys(echoed, status) == [], "a prompt whose log-probabilities are wanted is computed whole"
    pooled = RequestState(request=replace(wanted(prompt=SHARED, tenant="t"), pooling=Pooling.MEAN))
    assert block_keys(pooled, status) == [], "and so is one of whose every hidden state an embedding is made"
    last = RequestState(request=replace(pooled.request, pooling=Pooling.LAST))
    short: list[bytes] = []
    extend_keys(short, root_key("model", "t", long_rope=False), SHARED[: len(SHARED) - 1], 16)
    assert block_keys(last, make_status(long_rope_after=len(SHARED))) == short, "no token follows its prompt"


async def test_a_worker_of_other_blocks_is_credited_with_its_own_keys_alone() -> None:
    """Decode and prefill worker cut the text unequally: each is known by keys of its own kind."""
    world = knowing()
    p, d = world.add("p", Role.PREFILL), world.add("d", Role.DECODE, block_size=8)
    await world.tokens(wanted("1", prompt=(*SHARED, 7)))
    index, state = world.fleet.prefixes, RequestState(request=wanted("2", prompt=(*SHARED, 9)))
    assert index is not None
    assert index.match(block_keys(state, p.status)) == {p.status.instance: 4}
    assert index.match(block_keys(state, d.status)) == {d.status.instance: 8}
    await world.fleet.close()


async def test_a_worker_that_reports_nonsense_spoils_no_request() -> None:
    world = knowing()
    world.add("odd", block_size=0, max_model_len=1000, waiting_tokens=900)
    fine = world.add("fine")
    request = wanted("1", prompt=(*SHARED, 7))
    assert await world.tokens(request) == expected(request)
    assert sent(fine) == ["1"]
    await world.fleet.close()


# ---- what a class is promised ---------------------------------------------------------------------------------------

COST = StepCost(fixed=0.001, token=0.001, samples=100, error=0.1)


def classed(name: str, ttft_ms: float | None = None, **fields: Any) -> Request:
    request = wanted(name, **fields)
    known = SERVICE_CLASSES[name.split("-")[0]]
    slo = Slo(ttft_ms=ttft_ms if ttft_ms is not None else known.ttft_slo_ms, tpot_ms=known.tpot_slo_ms)
    return replace(request, service_class=known.name, priority=known.priority, slo=slo)


async def test_a_request_that_is_late_everywhere_is_refused_at_once_and_told_when_to_come_back() -> None:
    world = World(policy="goodput")
    world.add("a", step_cost=COST, waiting_seconds=6.0, waiting_tokens=6000)
    world.add("b", step_cost=COST, waiting_seconds=9.0, waiting_tokens=9000)
    with pytest.raises(Overloaded) as refused:
        await world.tokens(classed("interactive"))
    assert refused.value.code == "slo" and refused.value.retry_after is not None
    assert 3.0 < refused.value.retry_after < 7.0, "about when the shorter queue will do"
    for kind in ("standard", "batch"):
        standing = replace(classed(kind), slo=Slo(ttft_ms=1000.0))
        if kind == "standard":
            assert await world.tokens(standing) == expected(standing), "of a class that waits its turn"
    assert world.held() == {}
    await world.fleet.close()


async def test_a_prompt_that_alone_takes_too_long_is_not_told_to_come_back() -> None:
    world = World(policy="goodput")
    world.add("a", step_cost=replace(COST, token=0.1), waiting_seconds=1.0, waiting_tokens=10)
    with pytest.raises(Overloaded) as refused:
        await world.tokens(classed("interactive", prompt=tuple(range(3, 103))))
    assert refused.value.retry_after is None
    await world.fleet.close()


async def test_an_idle_worker_takes_a_prompt_that_will_be_late() -> None:
    """What was learned in a bad minute would hold for ever otherwise, and what is late uncached never be cached."""
    world = World(policy="goodput")
    world.add("a", step_cost=replace(COST, token=0.1))
    for number in range(3):
        request = classed(f"interactive-{number}", prompt=tuple(range(3, 63)))
        assert await world.tokens(request) == expected(request)
    await world.fleet.close()


async def test_one_that_has_waited_too_long_here_is_told_to_come_back() -> None:
    world = World(policy="goodput")
    world.add("a", step_cost=COST).script.open = [NoRoom("full")]
    waits = asyncio.create_task(world.tokens(classed("interactive")))
    await world.settled()
    world.now += 2.0
    world.beat()
    with pytest.raises(Overloaded) as refused:
        await waits
    assert refused.value.code == "slo" and refused.value.retry_after is not None
    await world.fleet.close()


@pytest.mark.usefixtures("looks_by_hand")
async def test_a_class_with_a_backlog_waits_at_the_router_while_queues_are_long() -> None:
    world = World(policy="goodput")
    world.add("a", step_cost=COST, waiting_seconds=3.0, waiting_tokens=3000)
    batch = asyncio.create_task(world.tokens(classed("batch")))
    await world.settled()
    assert world.placer.admission.waiting == 1 and not world.workers["a"].opened
    standard = classed("standard")
    async with asyncio.timeout(60):
        assert await world.tokens(standard) == expected(standard), "others are not held up, nor wait for a change"
    world.workers["a"].change(waiting_seconds=0.2, waiting_tokens=200)
    world.beat()
    assert await batch == expected(classed("batch"))
    await world.fleet.close()


@pytest.mark.usefixtures("looks_by_hand")
async def test_one_that_is_refused_keeps_nobody_back() -> None:
    world = World(policy="goodput")
    world.add("a", step_cost=COST, waiting_seconds=3.0, waiting_tokens=3000)
    batch = asyncio.create_task(world.tokens(classed("batch", prompt=tuple(range(3, 200)))))
    await world.settled()
    with pytest.raises(Overloaded):
        await world.tokens(classed("interactive"))
    patient = classed("interactive", ttft_ms=9000.0)
    async with asyncio.timeout(60):
        assert await world.tokens(patient) == expected(patient)
    batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    assert world.held() == {}
    await world.fleet.close()


@pytest.mark.usefixtures("looks_by_hand")
async def test_workers_that_say_they_are_full_are_not_asked() -> None:
    """But for one, where others hold most of them: asked, it will keep room (decode.turns)."""
    world = World(patience=300.0)
    for name in "abcd":
        world.add(name, leases=8, running=8).script.open = [NoRoom("full")]
    assert [type(error) for error in await world.outlasted(wanted())] == [Overloaded]
    assert sum(len(worker.opened) for worker in world.workers.values()) == 1
    for worker in world.workers.values():
        worker.opened.clear()
        worker.cancelled.clear()
        worker.script.open.clear()
    world.workers["c"].change(leases=7, running=7)
    world.beat()
    assert await world.tokens(wanted()) == expected(wanted())
    assert [name for name, worker in world.workers.items() if worker.opened] == ["c"]
    assert world.held() == {}
    await world.fleet.close()


async def test_a_worker_that_is_full_of_ones_own_leases_is_not_asked() -> None:
    world = World(patience=0.05)
    worker = world.add("a", max_seqs=1)
    worker.script.decode = [(2, HANG)]
    first = asyncio.create_task(world.tokens(wanted("1")))
    await world.settled()
    with pytest.raises(Overloaded):
        await world.tokens(wanted("2"))
    assert len(worker.opened) == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await world.settled()
    assert world.held() == {}
    await world.fleet.close()


async def test_one_that_never_had_its_turn_is_told_that_workers_are_full() -> None:
    world = World(patience=300.0)
    world.add("a").script.open = [NoRoom("full")] * 1000
    found = await world.outlasted(wanted("1"), wanted("2"))
    assert [(type(error), getattr(error, "code", None)) for error in found] == [(Overloaded, "no_room")] * 2
    await world.fleet.close()


async def test_a_deadline_that_passes_in_the_queue_is_told_as_such() -> None:
    world = World(patience=5.0)
    world.add("a").script.open = [NoRoom("full")] * 1000
    for left in (0.05, 0.0, -1.0):
        with pytest.raises(DeadlineExceeded):
            await world.tokens(replace(wanted(), deadline=world.now + left))
    await world.settled()
    assert world.held() == {}
    await world.fleet.close()


async def test_patience_is_that_of_the_class() -> None:
    classes = {**SERVICE_CLASSES, "hasty": ServiceClass(name="hasty", patience=0.05)}
    world = World(policy="goodput", classes=classes)
    world.add("a", step_cost=COST).script.open = [NoRoom("full")] * 100
    with pytest.raises(Overloaded) as refused:
        await world.tokens(replace(wanted("r"), service_class="hasty"))
    assert refused.value.code == "no_room" and "0.05 s" in refused.value.message
    await world.fleet.close()
