"""Storing back: which blocks are offered, that they are held and let go, and that it gives way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch

from kvcache.blocks.allocator import BlockAllocator
from kvcache.blocks.manager import KVCacheManager
from kvcache.connector import write_back as storeback
from kvcache.connector.block_io import part_bytes, read_blocks, write_part
from kvcache.connector.write_back import BlockMemory, WriteBack
from kvcache.memory.device import DeviceKV
from kvcache.pool.block import DEFAULT_NAMESPACE, PoolBlock, namespace_of, verify_block
from serving.engine.sequence import SequenceState
from serving.kvspec import AUTO, LayerKV, gqa, gqa_int8
from tests.fakes.sequences import make_sequence

SPECS = (gqa(2, 4, "float32"), gqa_int8(2, 4))
SIZE = 4


class Writer:
    """A pool that takes what it is given, when it is let."""

    def __init__(self) -> None:
        self.taken: list[PoolBlock] = []
        self.mistakes = 0  # calls that break
        self.open = asyncio.Event()
        self.open.set()

    @property
    def nodes(self) -> Sequence[str]:
        return ["pool:1"]

    async def put(self, blocks: Sequence[PoolBlock]) -> None:
        await self.open.wait()
        if self.mistakes:
            self.mistakes -= 1
            raise ZeroDivisionError("a mistake")
        self.taken += blocks


class World:
    def __init__(self, specs: Sequence[LayerKV] = SPECS, **settings: object) -> None:
        self.blocks = BlockAllocator(64, SIZE)
        self.device_kv = DeviceKV(specs, 64, SIZE)
        for planes in self.device_kv.planes:
            for plane in planes:
                plane.copy_(torch.randint(-100, 100, plane.shape))
        self.writer = Writer()
        self.busy = False
        self.back = WriteBack(
            self.writer,
            BlockMemory.on_device(self.device_kv, self.blocks),
            threading.RLock(),
            **settings,  # type: ignore[arg-type]
        )
        self.kv = KVCacheManager(self.blocks, "model", listener=self.back)
        self.free: list[int] = []  # blocks, each time that some were said to be free
        self.running = asyncio.create_task(self.back.run(lambda: self.busy, self.freed))

    def freed(self) -> None:
        self.free.append(self.blocks.available)

    def computed(
        self, tokens: int, *, seed: int = 0, output: int = 0, here: bool = True, kv_dtype: str = AUTO, **fields: object
    ) -> SequenceState:
        """A sequence of `tokens` prompt and `output` output tokens whose KV has just been computed."""
        seq = make_sequence(self.kv, [seed * 1000 + i for i in range(tokens)], **fields)  # type: ignore[arg-type]
        seq.kv_dtype = kv_dtype
        seq.incoming.prefilled_here = here
        self.kv.open(seq)
        seq.tokens += [900 + i for i in range(output)]
        self.kv.grow(seq)
        seq.computed = tokens + output
        self.kv.publish(seq)
        return seq

    def forget(self) -> None:
        """Evict every cached block."""
        self.blocks.release(self.blocks.allocate(self.blocks.available))

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.back.close()
        assert self.back.table(self.back.device) == []


async def test_blocks_go_with_their_bytes_and_digests_and_are_let_go() -> None:
    world = World()
    seq = world.computed(21)
    held = world.blocks.held
    assert len(world.back.table(world.back.device)) == 5 and held == len(seq.blocks)
    expected = read_blocks(world.device_kv, seq.blocks[:5], seq.prefix.keys, DEFAULT_NAMESPACE)
    await world.back.wait_idle()
    assert world.writer.taken == expected
    for block in world.writer.taken:
        verify_block(block)
    world.kv.release(seq)
    assert world.blocks.held == 0
    await world.stop()


async def test_whoever_waits_for_blocks_is_told_once_they_have_been_copied() -> None:
    world = World()
    world.kv.release(world.computed(20))
    assert world.blocks.available == 64 - 5 and not world.free
    await world.back.wait_idle()
    assert world.free[-1] == 64
    await world.stop()


async def test_bytes_come_back_as_they_were() -> None:
    world = World()
    seq = world.computed(16)
    blocks = read_blocks(world.device_kv, seq.blocks[:4], seq.prefix.keys, "n")
    assert [list(block.sizes) for block in blocks] == [part_bytes(world.device_kv)] * 4
    before = [[plane.clone() for plane in planes] for planes in world.device_kv.planes]
    others = [40, 7, 33, 21]
    for layer in range(len(SPECS)):
        write_part(world.device_kv, layer, others, b"".join(block.part(layer) for block in blocks))
    for planes, old in zip(world.device_kv.planes, before, strict=True):
        for plane, was in zip(planes, old, strict=True):
            assert torch.equal(plane[others], was[seq.blocks[:4]])
            untouched = [block for block in range(64) if block not in others]
            assert torch.equal(plane[untouched], was[untouched])
    await world.stop()


async def test_each_block_goes_as_what_it_holds() -> None:
    """Blocks of floats, and those that hold INT8 for a decode worker elsewhere, offered in turn."""
    world = World([gqa(2, 8, "bfloat16")] * 2)
    world.busy = True
    expected = []
    for seed, kv_dtype in enumerate((AUTO, "int8", "int8", AUTO)):
        seq = world.computed(9, seed=seed, kv_dtype=kv_dtype)
        expected += read_blocks(world.device_kv.kept_as(kv_dtype), seq.blocks[:2], seq.prefix.keys, DEFAULT_NAMESPACE)
    world.busy = False
    await world.back.wait_idle()
    assert world.writer.taken == expected
    assert len({block.sizes for block in expected}) == 2
    await world.stop()


async def test_what_is_held_is_bounded() -> None:
    world = World()
    world.writer.open.clear()
    for seed in range(5):
        world.kv.release(world.computed(20, seed=seed))
    assert len(world.back.table(world.back.device)) == world.back.device.most == 16
    assert world.back.dropped == 25 - 16
    assert world.blocks.held == 16
    await world.stop()
    assert world.blocks.held == 0


async def test_whoever_needs_blocks_gets_them() -> None:
    world = World()
    world.busy = True
    for seed in range(5):
        world.kv.release(world.computed(20, seed=seed))
    assert len(world.back.table(world.back.device)) == 16 and world.blocks.available == 48
    large = make_sequence(world.kv, range(10_000, 10_000 + 63 * SIZE))
    world.kv.open(large)
    assert len(large.blocks) == 64 and world.back.table(world.back.device) == []
    world.kv.release(large)
    world.kv.release(world.computed(20))
    assert len(world.back.table(world.back.device)) == 5, "what was given up may be offered again"
    await world.stop()


async def test_known_blocks_are_not_offered_again_until_the_pool_lacks_them() -> None:
    world = World()
    world.kv.release(world.computed(16))
    await world.back.wait_idle()
    world.forget()
    world.kv.release(world.computed(16))
    assert world.back.table(world.back.device) == []
    world.forget()
    keys = [block.key for block in world.writer.taken]
    world.back.found(keys[2:], here=False)
    world.kv.release(world.computed(16))
    await world.back.wait_idle()
    assert [block.key for block in world.writer.taken[4:]] == keys[2:]
    await world.stop()


async def test_a_decode_worker_offers_what_it_wrote_itself() -> None:
    world = World()
    seq = world.computed(8, output=8, here=False)
    await world.back.wait_idle()
    assert [block.key for block in world.writer.taken] == seq.prefix.keys[2:4]
    await world.stop()


@pytest.mark.parametrize(("settings", "blocks"), [({"outputs": False}, 2), ({"stop_token": 905}, 3), ({}, 4)])
async def test_outputs_are_left_out_as_asked(settings: dict[str, object], blocks: int) -> None:
    world = World(**settings)
    seq = world.computed(8, output=8)
    await world.back.wait_idle()
    assert [block.key for block in world.writer.taken] == seq.prefix.keys[:blocks]
    await world.stop()


async def test_a_tenants_blocks_count_against_the_tenant() -> None:
    world = World()
    world.computed(8, tenant="secret")
    world.computed(8, seed=1)
    await world.back.wait_idle()
    assert [block.namespace for block in world.writer.taken] == [namespace_of("secret")] * 2 + [DEFAULT_NAMESPACE] * 2
    assert "secret" not in namespace_of("secret")
    await world.stop()


async def test_it_gives_way_to_prompts_that_wait() -> None:
    world = World()
    world.busy = True
    world.computed(16)
    idle = asyncio.create_task(world.back.wait_idle())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not world.writer.taken
    world.busy = False
    await idle
    assert len(world.writer.taken) == 4
    await world.stop()


async def test_under_constant_load_blocks_leave_in_turn_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives way once, then rests after each batch, until nobody has waited."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(storeback.asyncio, "sleep", noted)
    monkeypatch.setattr(storeback, "BATCH_BYTES", 1)
    patience = round(storeback.PATIENCE_SECONDS / storeback.GIVE_WAY_SECONDS)
    world = World()
    for number, busy in enumerate((True, False, True)):
        world.busy = busy
        world.computed(32, seed=number)
        await world.back.wait_idle()
        assert len(world.writer.taken) == 8 * (number + 1)
        assert abs(slept.count(storeback.GIVE_WAY_SECONDS) - busy * patience) <= 1
        assert sum(seconds > 0 for seconds in slept) == slept.count(storeback.GIVE_WAY_SECONDS) + busy * 8
        slept.clear()
    await world.stop()


async def test_what_has_lost_bits_on_its_way_is_not_given_to_others() -> None:
    world = World()
    seq = make_sequence(world.kv, list(range(21)))
    seq.incoming.lossy = True
    world.kv.open(seq)
    seq.computed = 20
    world.kv.publish(seq)
    await world.back.wait_idle()
    assert world.back.table(world.back.device) == [] and world.writer.taken == []
    again = make_sequence(world.kv, list(range(21)))
    assert world.kv.known_blocks(again) == 0, "nor is it found in this worker"
    world.kv.release(seq)
    await world.stop()


async def test_storing_that_broke_goes_on_with_what_waits_and_holds_nothing_of_before() -> None:
    world = World()
    world.writer.mistakes = 1
    world.computed(32)
    world.computed(32, seed=1, tenant="of another batch")
    with pytest.raises(ZeroDivisionError):
        await world.running
    world.running = asyncio.create_task(world.back.run(lambda: world.busy))
    async with asyncio.timeout(60):
        await world.back.wait_idle()
    assert len(world.writer.taken) == 8 and world.back.table(world.back.device) == []
    await world.stop()
