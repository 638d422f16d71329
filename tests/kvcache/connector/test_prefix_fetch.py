"""Prefixes from the pool: whatever comes, in whatever order, only blocks that came whole count, and nothing leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.connector import prefix_fetch
from kvcache.connector.block_io import read_blocks
from kvcache.connector.fetch_cost import FetchCost
from kvcache.connector.prefix_fetch import PrefixArrival, PrefixFetcher
from kvcache.memory.device import DeviceKV
from kvcache.memory.locations import KVLocations
from kvcache.pool.block import DIGEST_BYTES, PoolBlock, Slab
from serving.kvspec import gqa
from tests.fakes.sequences import make_sequence

SPECS = (gqa(1, 2, "float32"), gqa(2, 2, "float32"), gqa(1, 4, "float32"))
SIZE = 4


class Reader:
    """A pool that holds blocks, loses pieces, and ends when it likes."""

    def __init__(self, held: dict[bytes, PoolBlock], lost: set[tuple[int, int]], short: int | None = None):
        self.held = held
        self.lost = lost  # (part, index) that never come
        self.short = short  # a part whose pieces have a byte too few
        self.asked: list[int] = []

    async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> int:
        self.asked.append(len(keys))
        found = [key in self.held for key in keys]
        return found.index(False) if False in found else len(found)

    async def get(
        self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
    ) -> AsyncGenerator[Slab, None]:
        for part in range(parts):
            indices = tuple(i for i, key in enumerate(keys) if key in self.held and (part, i) not in self.lost)
            pieces = [bytes(self.held[keys[i]].part(part)) for i in indices]
            if part == self.short:
                pieces = [piece[:-1] for piece in pieces]
            if indices:
                yield Slab(
                    part=part,
                    indices=indices,
                    sizes=tuple(map(len, pieces)),
                    digests=bytes(DIGEST_BYTES * len(indices)),
                    payload=b"".join(pieces),
                )
            await asyncio.sleep(0)


class World:
    def __init__(self, blocks: int = 64):
        self.blocks = BlockAllocator(blocks, SIZE)
        self.kv = KVCacheManager(self.blocks, "model")
        self.device_kv = DeviceKV(SPECS, blocks, SIZE)
        self.locations = KVLocations(self.device_kv, lock=threading.RLock())
        for planes in self.device_kv.planes:
            for plane in planes:
                plane.copy_(torch.randn(plane.shape))

    def prefixes(self, reader: Reader, wait: float = 5.0, freed: Callable[[], None] = lambda: None) -> PrefixFetcher:
        return PrefixFetcher(reader, self.kv, self.locations, FetchCost(), wait=wait, freed=freed)


def in_pool(prompt: list[int], count: int) -> dict[bytes, PoolBlock]:
    """The first blocks of the prompt as another worker computed them."""
    other = World()
    seq = make_sequence(other.kv, prompt)
    other.kv.open(seq)
    keys = other.kv.shareable_keys(seq)[:count]
    blocks = read_blocks(other.device_kv, seq.blocks[: len(keys)], keys, "default") if keys else []
    return {block.key: block for block in blocks}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 15),
    st.integers(0, 15),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 14)), max_size=3),
    st.booleans(),
)
def test_leading_blocks_that_came_whole_count(
    tokens: int, pooled: int, local: int, lost: set[tuple[int, int]], opened: bool
) -> None:
    prompt = list(range(tokens))
    held = in_pool(prompt, pooled)
    world = World()
    if local:  # what the worker has itself
        own = make_sequence(world.kv, prompt[: local * SIZE + 1])
        world.kv.open(own)
        own.computed = min(local * SIZE, len(own.tokens))
        world.kv.publish(own)
        world.kv.release(own)
    seq = make_sequence(world.kv, prompt)
    if opened:  # a lease's own sequence holds its blocks already
        world.kv.open(seq)
    known = world.kv.known_blocks(seq)
    reader = Reader(held, lost)
    asyncio.run(world.prefixes(reader).bring(seq))
    full = (tokens - 1) // SIZE
    wanted = max(0, min(pooled, full) - known)
    whole = next((i for i in range(wanted) if any((part, i) in lost for part in range(3))), wanted)
    if pooled <= known and full > known:
        assert reader.asked == [full - known] and (pooled == known or not wanted)
    if seq.blocks:
        assert seq.computed == (known + whole) * SIZE
        for i in range(known, known + whole):
            [found] = read_blocks(world.device_kv, [seq.blocks[i]], [seq.prefix.keys[i]], "default")
            assert found == held[seq.prefix.keys[i]]
        assert world.blocks.match(seq.prefix.keys) == seq.blocks[: known + whole]
    world.kv.release(seq)
    assert world.blocks.held == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["slab", "slab", "slab", "step", "hurry", "look", "end"]), max_size=40),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=2),
    st.integers(0, 2),
)
def test_steps_that_follow_an_arrival(events: list[str], lost: set[tuple[int, int]], local: int) -> None:
    """Whenever steps begin, leave and end: what counts is what came whole, and what such a step computed."""
    world = World()
    followed = Followed(world, local, lost)
    for event in events:
        getattr(followed, event)()
    while followed.slabs:
        followed.slab()
    followed.arrival.finish()
    followed.look()
    seq, arrival = followed.seq, followed.arrival
    if seq.ended:
        assert world.blocks.held == 0
        return
    whole = next((i for i in range(6 - local) if any((part, i + local) in lost for part in range(3))), 6 - local)
    there = (local + whole) * SIZE
    assert seq.incoming.arrival is None and followed.prefixes.stats.hits == whole * SIZE
    assert seq.incoming.fetched == whole * SIZE
    assert seq.computed == (len(seq.tokens) if followed.passed else there) and seq.cached == there
    assert world.blocks.match(seq.prefix.keys[: local + whole]) == seq.blocks[: local + whole]
    assert followed.passed == 0 or not lost & {(part, i) for part in range(3) for i in range(local, 6)}
    assert arrival.complete == (whole == 6 - local)


class Followed:
    """A prompt of six blocks and a token, of which `local` are computed; the rest comes but for what is lost."""

    def __init__(self, world: World, local: int, lost: set[tuple[int, int]]):
        self.world = world
        self.prefixes = world.prefixes(Reader({}, set()))
        self.seq = make_sequence(world.kv, list(range(6 * SIZE + 1)))
        world.kv.open(self.seq)
        world.kv.fetched(self.seq, local)
        self.arrival = PrefixArrival(self.prefixes, self.seq, local, 6, 3)
        self.seq.incoming.arrival = self.arrival
        self.open, self.arrival.barrier.open = self.arrival.barrier.open, self.opened  # type: ignore[method-assign]
        self.slabs = [(part, i) for part in range(3) for i in range(local, 6) if (part, i) not in lost]
        self.passed = 0
        self.local = local

    def opened(self, layers: int) -> None:
        assert layers < 3 or self.seq.incoming.arrival is None, "a step that passes now might end before all counts"
        self.open(layers)

    def slab(self) -> None:
        if self.slabs and not self.seq.ended:
            part, index = self.slabs.pop(0)
            self.arrival.here(part, [index - self.local])
        elif self.seq.ended:
            self.slabs.clear()

    def step(self) -> None:
        if not self.seq.in_flight and not self.seq.ended and self.seq.incoming.arrival is not None:
            self.seq.in_flight = True
            self.arrival.enter()
            assert self.seq.computed == 6 * SIZE

    def hurry(self) -> None:
        self.arrival.barrier.hurry()
        self.look()

    def look(self) -> None:
        """What the engine does with a step whose time it is, if it need not wait."""
        barrier, seq = self.arrival.barrier, self.seq
        if not seq.in_flight or not (barrier._fields.arrived in (-1, 3) or barrier._fields.hurried):
            return
        passes = barrier.passes(2)
        seq.in_flight = False
        if seq.ended:
            self.world.kv.release(seq)
        elif passes:
            self.passed = 1
            seq.computed += 1
            self.world.kv.publish(seq)
        elif seq.incoming.arrival is not None:
            seq.incoming.arrival.leave()
            assert seq.computed <= 6 * SIZE

    def end(self) -> None:
        """As serving.engine.engine.Engine.end."""
        if len(self.slabs) % 2 or self.seq.ended:  # now and then only
            return
        self.seq.ended = True
        if self.seq.in_flight:
            self.arrival.barrier.fail()
        else:
            self.world.kv.release(self.seq)


def test_a_first_layer_is_told_of_once_all_of_it_is_there() -> None:
    prompt = list(range(33))
    world = World()
    seq = make_sequence(world.kv, prompt)
    told: list[int] = []

    class Watched(Reader):
        async def get(
            self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
        ) -> AsyncGenerator[Slab, None]:
            async for slab in super().get(keys, parts=parts):
                for half in (slice(0, 4), slice(4, 8)):
                    size = len(slab.payload) // 8
                    assert seq.incoming.arrival is not None and told == ([0] if slab.part else [])
                    yield Slab(
                        part=slab.part,
                        indices=slab.indices[half],
                        sizes=slab.sizes[half],
                        digests=slab.digests[half.start * DIGEST_BYTES : half.stop * DIGEST_BYTES],
                        payload=slab.payload[half.start * size : half.stop * size],
                    )

    def begun() -> None:
        if not told:
            told.append(0)

    asyncio.run(world.prefixes(Watched(in_pool(prompt, 8), set())).bring(seq, begun))
    assert told == [0] and seq.incoming.arrival is None and seq.computed == 32


def test_pieces_of_another_size_are_not_written() -> None:
    prompt = list(range(33))
    world = World()
    seq = make_sequence(world.kv, prompt)
    prefixes = world.prefixes(Reader(in_pool(prompt, 8), set(), short=1))
    asyncio.run(prefixes.bring(seq))
    assert seq.computed == 0 and prefixes.stats.malformed == 1


def test_no_room_is_no_fetch() -> None:
    prompt = list(range(33))
    world = World(blocks=9)
    other = make_sequence(world.kv, list(range(100, 110)))
    world.kv.open(other)
    seq = make_sequence(world.kv, prompt)
    asyncio.run(world.prefixes(Reader(in_pool(prompt, 8), set())).bring(seq))
    assert not seq.blocks


def test_a_sequence_that_ended_meanwhile_is_not_written_to() -> None:
    prompt = list(range(33))
    world = World()
    seq = make_sequence(world.kv, prompt)

    class Ending(Reader):
        async def get(
            self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
        ) -> AsyncGenerator[Slab, None]:
            async for slab in super().get(keys, parts=parts):
                if slab.part == 1:
                    seq.ended = True
                    world.kv.release(seq)
                    before[:] = [plane.clone() for planes in world.device_kv.planes for plane in planes]
                yield slab

    before: list[torch.Tensor] = []
    asyncio.run(world.prefixes(Ending(in_pool(prompt, 8), set())).bring(seq))
    after = [plane for planes in world.device_kv.planes for plane in planes]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert world.blocks.held == 0


def test_blocks_that_were_written_to_when_their_sequence_ended_are_said_to_be_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(33))
    world = World()
    seq = make_sequence(world.kv, prompt)
    free: list[int] = []
    monkeypatch.setattr(type(world.device_kv), "in_host_memory", property(lambda self: False))  # so it takes a thread

    def write(*args: object) -> None:
        with world.locations.lock:
            if not seq.ended:
                seq.ended = True
                world.kv.release(seq)
                assert world.blocks.held and not free

    monkeypatch.setattr(prefix_fetch, "write_part", write)
    prefixes = world.prefixes(Reader(in_pool(prompt, 8), set()), freed=lambda: free.append(world.blocks.available))
    asyncio.run(prefixes.bring(seq))
    assert free == [64]


def test_prompt_logprobs_need_every_token_computed() -> None:
    prompt = list(range(33))
    world = World()
    reader = Reader(in_pool(prompt, 8), set())
    seq = make_sequence(world.kv, prompt, prompt_logprobs=1)
    asyncio.run(world.prefixes(reader).bring(seq))
    assert reader.asked == [] and not seq.blocks


@pytest.mark.parametrize("answers", [True, False])
def test_a_prompt_counts_as_waiting_while_the_pool_is_asked(answers: bool) -> None:
    """Storing gives way to it, though it is in no queue yet."""
    prompt = list(range(33))
    world = World()
    seen: list[int] = []

    class Asked(Reader):
        async def lookup(self, keys: Sequence[bytes], pin_seconds: float = 0.0) -> int:
            seen.append(prefixes.asking)
            await asyncio.sleep(0 if answers else 60)
            return 0

    prefixes = world.prefixes(Asked({}, set()), wait=0.01 if not answers else 5.0)
    asyncio.run(prefixes.bring(make_sequence(world.kv, prompt)))
    assert seen == [1] and prefixes.asking == 0


def test_a_prompt_is_taken_to_wait_for_the_first_layer_and_where_its_step_waits() -> None:
    """Not for the layers that come while those before them are computed."""
    prompt, now = list(range(33)), [0.0]
    world = World()
    seq = make_sequence(world.kv, prompt)

    class Slow(Reader):
        async def get(
            self, keys: Sequence[bytes], first_part: int = 0, last_part: int = 0, *, parts: int
        ) -> AsyncGenerator[Slab, None]:
            async for slab in super().get(keys, parts=parts):
                now[0] += 1.0
                if slab.part == 1 and seq.incoming.arrival is not None:
                    seq.incoming.arrival.barrier._fields.waited = int(0.5e9)  # a step that follows stood there
                yield slab

    held = in_pool(prompt, 8)
    prefixes = PrefixFetcher(Slow(held, set()), world.kv, world.locations, FetchCost(), wait=60.0, clock=lambda: now[0])
    asyncio.run(prefixes.bring(seq))
    size = sum(len(block.payload) for block in held.values())
    assert prefixes.cost.waiting_seconds == pytest.approx(1.5 / size)
    assert prefixes.cost.byte_seconds == pytest.approx(3.0 / size)
    world.kv.release(seq)
