"""KV that is copied while it moves to the host: the bytes of the right tokens, whenever they are looked for.

The engine's part is played step by step between, and in the middle of, the copies of who reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.blocks.offload import OffloadManager, OffloadPlan
from kvcache.handoff import sender as handoffs
from kvcache.handoff.chunk import Chunk, split, verify
from kvcache.handoff.sender import Handoff
from kvcache.memory.device import Bytes, DeviceKV
from kvcache.memory.host import HostKV
from kvcache.memory.locations import KVLocation, KVLocations
from serving.kvspec import gqa, gqa_int8
from tests.fakes.sequences import lease_id, make_sequence

SPECS = (gqa(1, 2, "float32"), gqa_int8(1, 3))
PLAN = OffloadPlan(
    block_size=4, device_blocks=8, extent_blocks=2, extents=8, segment_extents=1
)  # 6 blocks of a sequence
LENGTH = 70  # of 24 + 64 tokens there is room for
TOKEN_BYTES = sum(spec.token_bytes for spec in SPECS)


def kv_of(layer: int, position: int) -> list[Bytes]:
    """A token's KV, unlike that of any other: uint8 [1, token_bytes] for each plane."""
    made = np.random.default_rng([layer, position])
    return [made.integers(0, 256, (1, plane.token_bytes), dtype=np.uint8) for plane in SPECS[layer].planes]


def rows(place: KVLocation, layer: int) -> list[bytes]:
    """The place's tokens, one by one."""
    parts = place.device_kv.read(layer, place.device_kv.slots(place.blocks, place.start, place.end))
    return [b"".join(part[i].numpy().tobytes() for part in parts) for i in range(place.end - place.start)]


def wanted(layer: int, start: int, end: int) -> list[bytes]:
    return [b"".join(part.tobytes() for part in kv_of(layer, position)) for position in range(start, end)]


class CountingLock:
    """A lock that says how often it was taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *_: object) -> None: ...


class Engine:
    """Computes one long sequence as a worker does, one move of the step at a time: plan, copy out, compute."""

    def __init__(self, length: int = LENGTH) -> None:
        self.device_kv = DeviceKV(SPECS, PLAN.device_blocks, PLAN.block_size)
        self.host = HostKV(PLAN, self.device_kv, [None] * len(SPECS))
        self.tier = OffloadManager(PLAN)
        self.kv = KVCacheManager(BlockAllocator(PLAN.device_blocks, PLAN.block_size), "model", self.tier)
        self.lock = CountingLock()
        self.locations = KVLocations(self.device_kv, self.host, self.lock)
        self.seq = make_sequence(self.kv, range(length))
        self.kv.open(self.seq)
        assert self.seq.offload is not None
        self.offload = self.seq.offload
        self.planned = 0
        self.moves: list[Callable[[int], None]] = [self.plan, self.copy_out, self.compute]

    def go_on(self, count: int) -> None:
        """The next move of the step that runs, or of the next one, over about `count` tokens."""
        move, *later = self.moves
        self.moves = [*later, move]
        if self.seq.uncomputed:
            move(count)

    def plan(self, count: int) -> None:
        self.planned = self.kv.make_room(self.seq, min(count, self.seq.uncomputed))

    def copy_out(self, count: int) -> None:
        self.host.move(self.offload.moves)
        self.offload.settle()

    def compute(self, count: int) -> None:
        table = [0] * self.offload.blocks + self.seq.blocks
        for position in range(self.seq.computed, self.seq.computed + self.planned):
            slots = self.device_kv.slots(table, position, position + 1)
            for layer in range(len(SPECS)):
                self.device_kv.write(layer, slots, kv_of(layer, position))
        self.seq.computed += self.planned

    def compute_all(self, count: int = 10) -> None:
        while self.seq.uncomputed:
            self.go_on(count)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_what_is_read_is_of_the_right_tokens_whatever_moves_meanwhile(data: st.DataObject) -> None:
    engine, counts = Engine(), st.integers(1, 24)

    def copy(place: KVLocation) -> list[bytes]:
        """In two halves, between which the engine goes on."""
        assert place.end > place.start
        layer = asked
        found = rows(place, layer)
        for _ in range(data.draw(st.integers(0, 4))):
            engine.go_on(data.draw(counts))
        half = len(found) // 2
        return found[:half] + rows(place, layer)[half:]

    for _ in range(data.draw(st.integers(1, 10))):
        for _ in range(data.draw(st.integers(0, 7))):
            engine.go_on(data.draw(counts))
        if not engine.seq.computed:
            continue
        start = data.draw(st.integers(0, engine.seq.computed - 1))
        end = data.draw(st.integers(start + 1, engine.seq.computed))
        asked = data.draw(st.integers(0, len(SPECS) - 1))
        parts = engine.locations.read(engine.seq, start, end, copy)
        assert [row for part in parts for row in part] == wanted(asked, start, end)


def test_what_moved_while_it_was_copied_is_copied_again_from_the_host() -> None:
    engine = Engine()
    while engine.seq.computed < 24:
        engine.go_on(12)
    seen: list[tuple[bool, int, int]] = []

    def copy(place: KVLocation) -> None:
        seen.append((place.device_kv is engine.device_kv, place.start, place.end))
        if len(seen) == 1:
            engine.plan(8)  # tokens 0 to 8 are to move: they still lie where they did
        elif len(seen) == 2:
            engine.copy_out(8)  # from here on their blocks may be written

    engine.locations.read(engine.seq, 4, 20, copy)
    assert seen == [(True, 4, 20)], "a move that is only planned disturbs nobody"
    engine.locations.read(engine.seq, 4, 20, copy)
    assert seen[1:] == [(True, 4, 20), (False, 4, 8), (True, 8, 20)]
    engine.locations.read(engine.seq, 9, 20, copy)
    assert seen[4:] == [(True, 9, 20)]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), length=st.integers(PLAN.device_blocks * PLAN.block_size, PLAN.tokens - 1))
def test_what_comes_from_elsewhere_lies_where_attention_looks(data: st.DataObject, length: int) -> None:
    """In chunks of any size, the layers unequally far; then the sequence goes on, and more of it goes to the host."""
    engine = Engine(length)
    far = [0] * len(SPECS)
    while (behind := [layer for layer, upto in enumerate(far) if upto < length]) != []:
        layer = data.draw(st.sampled_from(behind))
        start, end = far[layer], min(length, far[layer] + data.draw(st.integers(1, 40)))
        tokens = [kv_of(layer, position) for position in range(start, end)]
        parts = [np.concatenate(planes) for planes in zip(*tokens, strict=True)]
        arriving = engine.locations.arriving(engine.seq, start, end)
        engine.locations.write(arriving, range(layer, layer + 1), [parts])
        far[layer] = end
    engine.seq.computed = length
    assert engine.host.bytes_out == 0, "nothing goes there by way of the device"
    while engine.seq.computed < PLAN.tokens - 1:
        engine.seq.tokens.append(0)
        engine.kv.grow(engine.seq)
        engine.planned = 1
        engine.copy_out(1)
        engine.compute(1)
    for layer, found in enumerate(attended(engine)):
        assert found == wanted(layer, 0, PLAN.tokens - 1)
    engine.kv.release(engine.seq)
    assert engine.tier.extents.held == engine.kv.allocator.held == 0


def attended(engine: Engine) -> Iterator[list[bytes]]:
    """Each layer's KV as a step sees it: pieces of the host, then the blocks that are left."""
    seq, offload = engine.seq, engine.offload
    with engine.host.stream(offload, seq.computed) as offloaded:
        for layer in range(len(SPECS)):
            found: list[bytes] = []
            for piece in offloaded.segments():
                planes = [plane.flatten(0, 1).flatten(1).view(torch.uint8) for plane in piece.planes]
                found += [b"".join(plane[i].numpy().tobytes() for plane in planes) for i in range(piece.tokens)]
            table = [0] * offload.blocks + seq.blocks
            yield found + rows(KVLocation(engine.device_kv, table, len(found), seq.computed), layer)


class SlowLink:
    """A HandoffLink that holds the first chunk back until it is told to go on."""

    room = None

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()

    async def push(self, chunk: Chunk) -> None:
        self.reached.set()
        await self.gate.wait()
        self.chunks.append(chunk)

    async def begin(self) -> int:
        return 0

    async def commit(self, commit: object) -> None: ...
    async def close(self) -> None: ...


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
async def test_kv_that_has_not_left_when_it_moves_leaves_from_the_host(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoffs, "CHUNK_BYTES", chunk_bytes)
    engine, link = Engine(), SlowLink()
    handoff = Handoff(engine.device_kv, link, engine.seq, lease_id(), "layout", 3, locations=engine.locations)
    running = asyncio.create_task(handoff.run())
    while engine.seq.uncomputed:
        engine.go_on(10)
        for layer in range(len(SPECS)):
            handoff.layer_done(layer, engine.seq.computed)
        if engine.seq.computed:
            await link.reached.wait()  # the first chunk is as good as gone, and no other is made
    assert engine.offload.moved >= (LENGTH - 24) // 8
    link.gate.set()
    await running
    got: list[list[bytes]] = [[] for _ in SPECS]
    for chunk in link.chunks:
        verify(chunk, engine.device_kv)
        for layer, parts in enumerate(split(chunk, engine.device_kv), chunk.first_layer):
            assert chunk.start == 3 + len(got[layer])
            got[layer] += [b"".join(part[i].tobytes() for part in parts) for i in range(chunk.end - chunk.start)]
    assert got == [wanted(layer, 3, LENGTH) for layer in range(len(SPECS))]
    assert handoff.bytes_sent == sum(len(chunk.payload) for chunk in link.chunks) == (LENGTH - 3) * TOKEN_BYTES


def test_a_sequence_that_fits_the_device_is_read_in_one_copy_and_without_the_lock() -> None:
    engine = Engine()
    engine.kv.release(engine.seq)
    seq = make_sequence(engine.kv, range(20))
    engine.kv.open(seq)
    found = engine.locations.read(seq, 3, 18, lambda place: (place.device_kv, place.start, place.end))
    assert found == [(engine.device_kv, 3, 18)] and engine.lock.taken == 0
