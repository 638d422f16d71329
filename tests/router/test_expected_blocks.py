"""Blocks that a prompt would have brought to its workers are not counted on once it is known that they do not come."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.blocks.events import KVEventLog
from router.block_keys import block_keys
from router.expected_blocks import ExpectedBlocks
from router.prefix_index import PrefixIndex
from router.request_state import RequestState
from serving.errors import Draining, Overloaded
from serving.messages import Request, Role
from serving.service_class import SERVICE_CLASSES
from tests.router.conftest import World, expected, wanted
from tests.router.scripted import HANG
from tests.router.test_degrade import COST, classed
from tests.router.test_giving_way import prefilling
from tests.router.test_prefix_index import CHAIN, ROOMY
from tests.router.test_sheddable import CLASSES, HANGS, a_queue_later, ended, waiting

pytestmark = pytest.mark.usefixtures("ties_by_name")
PROMPT = tuple(n % 900 for n in range(65))  # four blocks of 16 that may be found again
WORKERS = st.sampled_from("ab")
SPANS = st.tuples(WORKERS, st.integers(0, 8), st.integers(1, 4))


def held(index: PrefixIndex) -> set[tuple[str, int]]:
    """Workers, and the blocks of the chain that the index says they hold, each by itself."""
    return {(name, number) for number, key in enumerate(CHAIN) for name in index.match([key])}


def known(index: PrefixIndex, name: str) -> KVEventLog:
    """The worker has told what it holds: a block of another chain."""
    log = KVEventLog()
    log.stored(sha256(b"another").digest())
    index.apply(name, log.since(0))
    return log


def stored(index: PrefixIndex, log: KVEventLog, name: str, number: int) -> None:
    log.stored(CHAIN[number])
    index.apply(name, log.since(index.since(name)))


def test_what_is_expected_of_a_worker_outlasts_its_first_report() -> None:
    """A worker that held nothing answers with all it holds by then."""
    index, log = PrefixIndex(ROOMY), KVEventLog()
    index.apply("a", log.since(0))
    waits = ExpectedBlocks(index)
    waits.expect("a", CHAIN[:8])
    log.stored(CHAIN[2])
    log.stored(sha256(b"another").digest())
    report = log.since(index.since("a"))
    assert report.reset
    index.apply("a", report)
    assert held(index) == {("a", number) for number in range(8)}
    waits.give_up()
    assert held(index) == {("a", 2)}


@given(
    st.lists(st.tuples(WORKERS, st.integers(0, 11)), max_size=6),
    st.lists(st.tuples(SPANS, st.booleans()), min_size=1, max_size=5),
    st.lists(st.tuples(WORKERS, st.integers(0, 11)), max_size=4),
    st.randoms(use_true_random=False),
)
def test_what_does_not_come_is_taken_back_and_nothing_else(
    before: list[tuple[str, int]],
    prompts: list[tuple[tuple[str, int, int], bool]],
    meanwhile: list[tuple[str, int]],
    draw: Any,
) -> None:
    """Prompts of the same blocks overlap as they like, and are over in any order."""
    index = PrefixIndex(ROOMY)
    logs = {name: known(index, name) for name in "ab"}
    for name, number in before:
        stored(index, logs[name], name, number)
    there, open_ = set(before), list[tuple[ExpectedBlocks, str, bool]]()
    for (name, first, count), comes in prompts:
        made = ExpectedBlocks(index)
        made.expect(name, CHAIN[first : first + count])
        open_.append((made, name, comes))
        assert held(index) >= {(name, number) for number in range(first, first + count)}
        there |= {(name, number) for number in range(first, first + count)} if comes else set()
    for name, number in meanwhile:
        stored(index, logs[name], name, number)
    there |= set(meanwhile)
    draw.shuffle(open_)
    for made, name, comes in open_:
        if comes:
            made.came(name)
        made.give_up()
        made.give_up()
        assert held(index) >= {*before, *meanwhile}
    assert held(index) == there
    assert index._expected == {} and index._to_come == 0


def test_what_is_gone_or_forgotten_is_not_taken_back() -> None:
    index = PrefixIndex(ROOMY)
    made = ExpectedBlocks(index)
    made.expect("a", CHAIN[:3])
    index.retain(["b"])
    assert index._expected == {} and index._to_come == 0
    made.give_up()
    assert held(index) == set() and "a" not in index.numbers()
    log = known(index, "b")
    made = ExpectedBlocks(index)
    made.expect("b", CHAIN[:3])
    stored(index, log, "b", 1)
    made.give_up()
    assert held(index) == {("b", 1)}, "what was computed of it before it ended"


def test_no_more_are_remembered_than_half_as_many_as_there_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "most_keys", 10)
    index = PrefixIndex(ROOMY)
    first, second = ExpectedBlocks(index), ExpectedBlocks(index)
    first.expect("a", CHAIN[:4])
    second.expect("a", CHAIN[4:6])
    assert index._to_come == 4 and index.match(CHAIN[4:6]) == {"a": 2}, "they are counted on all the same"
    second.give_up()
    first.give_up()
    assert index._to_come == 0 and index.match(CHAIN[:4]) == {} and index.match(CHAIN[4:6]) == {"a": 2}


def blocks_at(world: World, request: Request) -> dict[str, int]:
    state = RequestState(request=request)
    assert world.fleet.prefixes is not None
    (status, *_) = (worker.status for worker in world.workers.values())
    return world.fleet.prefixes.match(block_keys(state, status))


async def test_a_prompt_that_was_shed_leaves_no_blocks_where_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.router.test_sheddable.classed", lambda *args, **fields: long(*args, **fields))
    world, back = World(policy="goodput", classes=CLASSES), asyncio.Event()
    world.add("a", step_cost=COST)
    interactive = SERVICE_CLASSES["interactive"]
    running, request = await waiting(world, interactive, 8, back), long("r", interactive, max_tokens=8)
    assert blocks_at(world, request) != {}
    await a_queue_later(world, back)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(running, HANGS)
    assert blocks_at(world, request) == {}
    await ended(world)


def long(*args: Any, **fields: Any) -> Request:
    return replace(classed(*args, **fields), prompt=PROMPT)


async def test_a_client_that_leaves_its_place_in_a_queue_leaves_no_blocks() -> None:
    world = World(policy="prefix_aware")
    worker, request = world.add("a"), wanted("1", prompt=PROMPT)
    worker.script.before_first.append(HANG)
    running = asyncio.create_task(world.tokens(request))
    await prefilling(world, "a")
    assert blocks_at(world, request) != {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert blocks_at(world, request) == {}
    await world.fleet.close()


async def test_blocks_stay_where_a_prompt_was_computed_and_went_and_not_where_a_try_failed() -> None:
    """The first worker leaves before it has computed anything; the lease is kept for the second."""
    world = World(policy="prefix_aware")
    first, request = world.add("a", Role.PREFILL), wanted("1", prompt=PROMPT)
    second, decode = world.add("b", Role.PREFILL, waiting_tokens=9), world.add("c", Role.DECODE)
    first.script.before_first.append(Draining("it leaves"))
    assert await world.tokens(request) == expected(request)
    assert len(first.orders) == len(second.orders) == 1
    assert blocks_at(world, request) == {each.status.instance: 4 for each in (second, decode)}
    await world.fleet.close()
