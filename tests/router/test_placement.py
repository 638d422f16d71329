"""Placement by prefixes: the router's own placements and the workers' KV events lead a request to its cached blocks."""

from __future__ import annotations

import asyncio

import pytest

from kvcache.blocks.events import KVEventLog
from kvcache.blocks.prefix import extend_keys, root_key
from router.placement import block_keys
from router.request_state import RequestState
from serving.messages import Role
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import ScriptedWorker, make_status

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
