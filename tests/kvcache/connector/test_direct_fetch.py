"""Prefixes straight into a lease: found, fetched, waited for no longer than it pays, and never written too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
import torch

from kvcache.connector.block_io import read_blocks
from kvcache.connector.direct_fetch import DirectFetch, DirectFetcher
from kvcache.connector.fetch_cost import PROBE_EVERY, DirectCost, FetchCost
from kvcache.pool.block import PoolBlock, Slab
from serving.engine.sequence import SequenceState
from tests.fakes.sequences import make_sequence
from tests.kvcache.connector.test_prefix_fetch import SIZE, Reader, World, in_pool

PROMPT = list(range(8 * SIZE + 1))


class Stopping(Reader):
    """A pool that stops after `after` slabs until `gate` is set; `answers` likewise for what it has."""

    def __init__(self, held: dict[bytes, PoolBlock], lost: set[tuple[int, int]] | None = None):
        super().__init__(held, lost or set())
        self.after: int | None = None
        self.gate = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self.sent = 0
        self.endless = False  # the stream goes on when all has been sent

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> int:
        await self.answers.wait()
        return await super().lookup(keys, pin_seconds)

    async def get(
        self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
    ) -> AsyncGenerator[Slab, None]:
        async for slab in super().get(keys, parts=parts):
            if self.sent == self.after:
                await self.gate.wait()
            self.sent += 1
            yield slab
        if self.endless:
            await self.gate.wait()


class Direct:
    """A worker's blocks, a lease's sequence that holds some of them, and a pool that has `pooled` of its blocks."""

    def __init__(
        self, pooled: int = 8, lost: set[tuple[int, int]] | None = None, *, always: bool = True, wait: float = 5.0
    ):
        self.world = World()
        self.held = in_pool(PROMPT, pooled)
        self.reader = Stopping(self.held, lost)
        self.cost = DirectCost(FetchCost())
        world = self.world
        self.direct = DirectFetcher(self.reader, world.kv, world.locations, self.cost, wait=wait, always=always)
        self.seq = self.lease()

    def lease(self) -> SequenceState:
        seq = make_sequence(self.world.kv, PROMPT)
        self.world.kv.open(seq)
        return seq

    async def begin(self) -> DirectFetch:
        arrival = await self.direct.find(self.seq)
        assert arrival is not None
        return self.direct.begin(arrival)

    async def sent(self, slabs: int) -> None:
        """Wait until so many slabs have been written, and the next is held back."""
        self.reader.after = slabs
        async with asyncio.timeout(60):
            while self.reader.sent < slabs:
                await asyncio.sleep(0)

    def planes(self) -> list[torch.Tensor]:
        return [plane.clone() for planes in self.world.device_kv.planes for plane in planes]


@pytest.mark.parametrize("pooled", [1, 5, 8])
async def test_what_the_pool_has_is_there_when_all_else_is(pooled: int) -> None:
    its = Direct(pooled)
    fetch = await its.begin()
    assert (fetch.arrival.first, fetch.arrival.last) == (0, pooled)
    assert await its.direct.settle(fetch) == pooled * SIZE
    for block, key in zip(its.seq.blocks[:pooled], its.seq.prefix.keys, strict=False):
        assert read_blocks(its.world.device_kv, [block], [key], "default") == [its.held[key]]
    await asyncio.wait([fetch.task])
    assert (its.direct.fallbacks, its.direct.running, its.direct.stats.hits) == (0, 0, pooled * SIZE)


async def test_only_what_follows_its_own_blocks_is_asked_for() -> None:
    its = Direct()
    its.world.kv.fetched(its.seq, 3)
    another = its.lease()
    assert another.computed == 3 * SIZE
    arrival = await its.direct.find(another)
    assert arrival is not None and (arrival.first, arrival.last) == (3, 8) and its.reader.asked == [5]
    its.world.kv.fetched(its.seq, 8)
    assert await its.direct.find(its.lease()) is None and its.reader.asked == [5]


async def test_a_pool_without_it_or_without_an_answer_brings_nothing() -> None:
    assert await Direct(0).direct.find(Direct(0).seq) is None
    its = Direct(wait=0.01)
    its.reader.answers.clear()
    assert await its.direct.find(its.seq) is None and its.reader.asked == []


async def test_what_does_not_pay_is_not_even_asked_for() -> None:
    its = Direct(always=False)
    its.cost.byte_seconds, its.direct.cost.byte_seconds = 1e-9, 1e-6
    assert await its.direct.find(its.seq) is None and its.reader.asked == []
    its.cost.byte_seconds = 1e-3
    assert await its.direct.find(its.seq) is not None


@pytest.mark.parametrize(("part", "block"), [(0, 0), (2, 5), (1, 7)])
async def test_blocks_before_the_first_that_lacks_a_piece_count(part: int, block: int) -> None:
    its = Direct(lost={(part, block)})
    fetch = await its.begin()
    assert await its.direct.settle(fetch) == block * SIZE
    assert its.direct.fallbacks == 1
    assert its.world.blocks.match(its.seq.prefix.keys) == its.seq.blocks[:block]


async def test_the_wait_ends_when_the_other_way_would_have_brought_it() -> None:
    its = Direct(always=False, wait=600)
    fetch = await its.begin()
    await its.sent(2)
    its.cost.byte_seconds = 1e-6
    assert await asyncio.wait_for(its.direct.settle(fetch), 60) == 0
    assert its.direct.fallbacks == 1 and its.direct.running == 0
    assert [its.cost.pays(1) for _ in range(PROBE_EVERY)] == [False] * PROBE_EVERY, "left alone for a while"


async def test_a_fetch_that_must_be_waited_for_ends_by_itself() -> None:
    its = Direct(wait=0.05)
    fetch = await its.begin()
    await its.sent(2)
    assert await its.direct.settle(fetch) == 0 and its.direct.running == 0


async def test_all_is_there_though_the_stream_does_not_end() -> None:
    its = Direct(wait=600)
    its.reader.endless = True
    fetch = await its.begin()
    assert await asyncio.wait_for(its.direct.settle(fetch), 60) == 8 * SIZE
    assert not fetch.task.done() and its.direct.fallbacks == 0
    its.reader.gate.set()
    await fetch.task


async def test_nothing_is_written_after_a_stop_or_the_end_of_its_sequence() -> None:
    for how in ("stop", "end"):
        its = Direct(wait=600)
        fetch = await its.begin()
        await its.sent(1)
        if how == "stop":
            fetch.stop()
        else:
            its.seq.ended = True
            its.world.kv.release(its.seq)
        before = its.planes()
        its.reader.gate.set()
        await asyncio.wait([fetch.task])
        assert fetch.task.cancelled() or fetch.task.exception() is None
        assert all(torch.equal(old, new) for old, new in zip(before, its.planes(), strict=True))
        assert its.seq.computed == 0 and its.direct.running == 0
