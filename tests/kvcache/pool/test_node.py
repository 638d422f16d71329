"""A pool node through its link, in process and over gRPC alike: one suite for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from kvcache.pool import node as nodes
from kvcache.pool.block import PoolBlock
from kvcache.pool.links import BlockSelection, PoolEvent
from serving.errors import CorruptChunk, Draining, Overloaded
from serving.messages import Tier
from tests.kvcache.pool.nodes import KINDS, PARTS, Served, block, content, key


@pytest.fixture(params=KINDS)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    made = await Served(request.param).start()
    yield made
    await made.stop()


async def parts(served: Served, numbers: list[int], first: int = 0, last: int = 0) -> dict[tuple[int, int], bytes]:
    """What a get brings, by (index, part)."""
    found = {}
    async for slab in served.link.get([key(number) for number in numbers], first, last):
        for index, _, data in slab.parts():
            assert (index, slab.part) not in found
            found[index, slab.part] = bytes(data)
    return found


async def test_what_was_put_is_found_and_read(served: Served) -> None:
    assert await served.link.put([block(number) for number in range(5)]) == 5
    assert await served.link.lookup([key(3), key(9), key(0)]) == [True, False, True]
    expected = {(place, part): content(number, part) for place, number in enumerate((4, 2)) for part in range(PARTS)}
    assert await parts(served, [4, 2]) == expected


async def test_only_the_parts_asked_for_come(served: Served) -> None:
    await served.link.put([block(1)])
    assert await parts(served, [1], 1, 3) == {(0, 1): content(1, 1), (0, 2): content(1, 2)}
    assert await parts(served, [1], 3, 0) == {(0, 3): content(1, 3)}


async def test_a_key_that_is_not_here_is_left_out(served: Served) -> None:
    await served.link.put([block(1), block(3)])
    assert {index for index, _ in await parts(served, [1, 2, 3])} == {0, 2}


async def test_a_put_of_many_megabytes_arrives(served: Served) -> None:
    blocks = [block(number, parts=2, size=1 << 20) for number in range(12)]
    assert await served.link.put(blocks) == 12
    assert await served.link.lookup([one.key for one in blocks]) == [True] * 12
    assert (await parts(served, [11]))[0, 1] == content(11, 1, 1 << 20)


async def test_a_corrupt_block_is_refused_on_arrival(served: Served) -> None:
    good = block(1)
    bad = replace(good, payload=bytes(good.payload[:-1]) + bytes([good.payload[-1] ^ 1]))
    with pytest.raises(CorruptChunk) as refused:
        await served.link.put([bad])
    assert refused.value.code == "digest"
    assert await served.link.lookup([key(1)]) == [False]
    assert (await served.link.report()).stat.refused == 1


async def test_evicting_by_key_and_by_namespace(served: Served) -> None:
    await served.link.put([block(number, namespace="ab"[number % 2]) for number in range(6)])
    assert await served.link.evict(BlockSelection(keys=(key(0), key(9)))) == 1
    assert await served.link.evict(BlockSelection(namespace="b")) == 3
    assert await served.link.lookup([key(number) for number in range(6)]) == [False, False, True, False, True, False]
    assert await served.link.evict(BlockSelection()) == 2


async def test_a_pinned_block_stays(served: Served) -> None:
    await served.link.put([block(1), block(2)])
    await served.link.lookup([key(1)], 60.0)
    assert await served.link.evict(BlockSelection()) == 1
    assert await served.link.lookup([key(1), key(2)]) == [True, False]


async def test_the_listing_tells_of_every_block(served: Served) -> None:
    await served.link.put([block(1, namespace="a"), block(2, namespace="b")])
    await served.link.lookup([key(2)], 60.0)
    entries = {entry.key: entry async for entry in served.link.entries(BlockSelection())}
    assert entries.keys() == {key(1), key(2)}
    one = entries[key(2)]
    assert (one.namespace, one.tiers, one.pinned, entries[key(1)].pinned) == ("b", (Tier.RAM,), True, False)
    assert one.bytes >= 4000 and one.age_seconds >= 0
    assert [entry.key async for entry in served.link.entries(BlockSelection(namespace="a"))] == [key(1)]


async def test_the_figures_are_the_stores(served: Served) -> None:
    await served.link.put([block(1), block(2)])
    await served.link.lookup([key(1), key(9)])
    await parts(served, [1])
    stat = (await served.link.report()).stat
    assert (stat.name, stat.stored, stat.lookups, stat.found) == ("node", 2, 2, 1)
    assert stat.instance == served.node.instance
    ram = stat.tiers[Tier.RAM]
    assert (ram.blocks, ram.capacity, ram.hits) == (2, 64 << 20, 1) and ram.bytes >= 8000
    assert stat.namespaces["default"].blocks == 2


async def test_verifying_reads_everything(served: Served) -> None:
    await served.link.put([block(1), block(2)])
    assert await served.link.verify() == (2, 0)


# ---- events --------------------------------------------------------------------------------------------------------


async def take(events: Any, count: int) -> list[PoolEvent]:
    async with asyncio.timeout(60):
        return [await anext(events) for _ in range(count)]


async def test_events_begin_with_what_is_here_and_go_on_with_what_changes(served: Served) -> None:
    await served.link.put([block(1)])
    async with aclosing(served.link.events()) as events:
        assert await take(events, 1) == [PoolEvent(kind="stored", keys=(key(1),), sequence=0)]
        await served.link.put([block(2)])
        await served.link.evict(BlockSelection(keys=(key(1),)))
        assert await take(events, 2) == [
            PoolEvent(kind="stored", keys=(key(2),), sequence=1),
            PoolEvent(kind="evicted", keys=(key(1),), sequence=2),
        ]
    async with asyncio.timeout(60):
        while served.node._listeners:
            await asyncio.sleep(0.001)


async def test_a_listener_that_is_too_slow_starts_anew(served: Served) -> None:
    served.node._event_room = 2
    async with aclosing(served.node.events()) as events:
        assert await take(events, 1) == [PoolEvent(kind="stored", keys=(), sequence=0)]
        for number in range(4):
            await served.link.put([block(number)])
        await served.link.evict(BlockSelection(keys=(key(0),)))
        cleared, stored = await take(events, 2)
        assert cleared == PoolEvent(kind="cleared", keys=(), sequence=1)
        assert (stored.kind, stored.sequence) == ("stored", 2)
        assert sorted(stored.keys) == sorted(key(number) for number in (1, 2, 3))
        await served.link.put([block(7)])
        assert await take(events, 1) == [PoolEvent(kind="stored", keys=(key(7),), sequence=3)]


async def test_events_end_with_the_node(served: Served) -> None:
    events = served.node.events()
    assert len(await take(events, 1)) == 1
    ending = asyncio.ensure_future(anext(events, None))
    await served.kill()
    assert await ending is None


# ---- leaving and limits --------------------------------------------------------------------------------------------


async def test_a_node_that_leaves_still_reads_but_stores_no_more(served: Served) -> None:
    await served.link.put([block(1)])
    await served.node.drain(0)
    assert (await served.node.report()).draining
    with pytest.raises(Draining):
        await served.link.put([block(2)])
    assert await served.link.lookup([key(1), key(2)]) == [True, False]


async def test_draining_waits_for_a_read_in_progress(served: Served) -> None:
    await served.link.put([block(1)])
    served.store.after = 0
    reading = asyncio.create_task(parts(served, [1]))
    async with asyncio.timeout(60):
        while not served.node.calls:
            await asyncio.sleep(0.001)
    draining = asyncio.create_task(served.node.drain(10))
    done, _ = await asyncio.wait([draining], timeout=0.05)
    assert not done
    served.store.gate.set()
    assert len(await reading) == PARTS
    await draining
    assert served.node.calls == 0


async def test_too_many_puts_at_once_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MOST_PUTS", 0)
    with pytest.raises(Overloaded) as refused:
        await served.link.put([block(1)])
    assert refused.value.code == "puts" and refused.value.retry_after == 1.0


async def test_leaving_a_get_early_frees_the_reader(served: Served) -> None:
    await served.link.put([block(1)])
    async with aclosing(served.link.get([key(1)], 0, 0)) as slabs:
        await anext(slabs)
    async with asyncio.timeout(60):
        while served.node.calls:
            await asyncio.sleep(0.001)
    assert len(await parts(served, [1])) == PARTS


class SlowCheck:
    """Of `verify`: tells when the first copy is looked at, and holds it until `gate` is released."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch):
        self.begun = asyncio.Event()
        self.gate = threading.Semaphore(0)
        self.checked = 0
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(served.store, "_damaged_block", self._check)

    def _check(self, _: PoolBlock) -> bool:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.gate.acquire(timeout=10)
        self.checked += 1
        return False


async def test_verifying_ends_with_its_caller_and_keeps_nobody_waiting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.link.put([block(number) for number in range(5)])
    slow = SlowCheck(served, monkeypatch)
    verifying = asyncio.create_task(served.link.verify())
    async with asyncio.timeout(60):
        await slow.begun.wait()
        assert await served.link.evict(BlockSelection(keys=(key(0),))) == 1
        verifying.cancel()
        await asyncio.gather(verifying, return_exceptions=True)
        while served.node.calls:
            await asyncio.sleep(0.001)
        slow.gate.release(5)
        monkeypatch.undo()
        assert await served.link.verify() == (4, 0)
    assert slow.checked == 1


async def test_verifying_does_not_keep_a_node_from_leaving(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.link.put([block(number) for number in range(5)])
    slow = SlowCheck(served, monkeypatch)
    verifying = asyncio.create_task(served.link.verify())
    async with asyncio.timeout(60):
        await slow.begun.wait()
        draining = asyncio.create_task(served.node.drain(10))
        await asyncio.sleep(0)
        slow.gate.release(5)
        with pytest.raises(Draining, match="not everything has been read"):
            await verifying
        await draining
    assert slow.checked == 1
