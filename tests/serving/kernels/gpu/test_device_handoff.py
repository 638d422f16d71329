"""KV from device to device, interpreted: packed and digested on one, unpacked and digested on another, no byte of it
in host memory between. NIXL moves it where that is installed; the device's memory is a CPU's, and is called so.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from decode.service import DecodeService
from kvcache.handoff import nixl_device
from kvcache.handoff.chunk import Chunk, encode, packed, split, verify
from kvcache.handoff.dialer import Dialer
from kvcache.handoff.nixl_device import NixlDeviceLender, NixlDeviceWriters, device_lenders
from kvcache.handoff.sender import Handoff
from kvcache.memory import device_room
from kvcache.memory.device import DeviceKV
from kvcache.memory.device_room import DevicePayload, DeviceRoom
from kvcache.memory.heads import HeadSlice
from kvcache.memory.locations import KVLocations
from kvcache.transfer.choice import lenders_for
from kvcache.transfer.lent_memory import BUFFER_BYTES, TransferUnavailable
from kvcache.transfer.nixl_agent import DRAM, VRAM, Agent
from serving.errors import CorruptChunk
from serving.messages import TransportOffer
from serving.rpc import server
from tests.fakes.kv_layouts import LAYOUTS, all_bytes, random_pool, same_parts
from tests.fakes.sequences import lease_id, make_sequence
from tests.gpu.fake_cuda import FakeCuda, installed
from tests.gpu.test_order import ORDERS
from tests.kvcache.handoff.test_transports import Taking
from tests.kvcache.reaching import granted, needs_nixl

BLOCKS = [3, 1, 5, 0, 2, 4]
TOKENS = 23


def on_device(cuda: FakeCuda, host: DeviceKV) -> DeviceKV:
    """The same bytes, on the device."""
    planes = [tuple(map(cuda.tensor, layer)) for layer in host.planes]
    return DeviceKV(host.specs, host.num_blocks, host.block_size, planes=planes)


def back(cuda: FakeCuda, device_kv: DeviceKV) -> DeviceKV:
    """What lies on the device, in host memory."""
    planes = [tuple(map(cuda.peek, layer)) for layer in device_kv.planes]
    return DeviceKV(device_kv.specs, device_kv.num_blocks, device_kv.block_size, planes=planes)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "latent"])
@settings(max_examples=4, deadline=None, phases=[Phase.generate])  # shrinking takes minutes, interpreted
@given(cuda=ORDERS, data=st.data())
def test_a_chunk_is_packed_and_unpacked_where_it_lies(name: str, cuda: FakeCuda, data: st.DataObject) -> None:
    """Its digest is that of host memory; what is written to the buffer once it is copied out harms nothing."""
    with installed(cuda):
        host = random_pool(LAYOUTS[name], 6, 4, 1)
        sending, receiving = on_device(cuda, host), on_device(cuda, random_pool(LAYOUTS[name], 6, 4, 2))
        wanted = back(cuda, receiving)
        start = data.draw(st.integers(0, 22))
        where = (data.draw(st.permutations(range(6))), start, data.draw(st.integers(start + 1, 24)))
        layers = range(len(host.specs))
        out, come = (DeviceRoom(cuda, 1, BUFFER_BYTES) for _ in range(2))
        chunk = encode(sending, lease_id(), "layout", layers, *where, room=out)
        expected = encode(host, lease_id(), "layout", layers, *where)
        size = len(expected.payload)
        assert chunk.digest == expected.digest and len(chunk.payload) == size
        if size % 8:
            assert chunk == expected, "it is not digested by the device, and passes through host memory"
            return
        assert isinstance(chunk.payload, DevicePayload)
        buffer = cuda.room(BUFFER_BYTES)
        buffer[:size].copy_(chunk.payload.bytes_there)  # what a transport does
        cuda.finish()
        taken = come.taken(buffer[:size])
        assert taken is not None
        buffer.fill_(0)
        arrived = replace(chunk, payload=taken)
        verify(arrived, receiving)
        there = packed(arrived, receiving.specs)
        assert there is taken
        part = replace(arrived, last_head=1)
        assert host.specs[0].heads is None or packed(part, receiving.specs) is None, "some heads lie otherwise"
        to = data.draw(st.permutations(range(6)))
        receiving.unpack(layers, receiving.slots(to, *where[1:]), there)
        wanted.write_all(layers, wanted.slots(to, *where[1:]), split(expected, host))
        assert all_bytes(back(cuda, receiving)) == all_bytes(wanted)
        assert [bytes(one) for one in (taken.to_host(), chunk.payload.to_host())] == [bytes(expected.payload)] * 2


def test_no_byte_of_kv_passes_the_host() -> None:
    """Numbers of blocks go to the device, and digests come from it: copies of a few hundred bytes, on copy streams."""
    cuda = FakeCuda(3, 0.5)
    with installed(cuda):
        kv = on_device(cuda, random_pool(LAYOUTS["bfloat16"], 6, 4, 1))
        rooms = DeviceRoom(cuda, 1, BUFFER_BYTES), DeviceRoom(cuda, 1, BUFFER_BYTES)
        sizes: list[int] = []
        copy = cuda._copy

        def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
            if type(target) is not type(source):
                sizes.append(target.nbytes)
            return copy(target, source, non_blocking)

        cuda._copy = counted  # type: ignore[method-assign]
        chunk = encode(kv, lease_id(), "layout", range(2), BLOCKS, 0, 24, room=rooms[0])
        assert isinstance(chunk.payload, DevicePayload)
        taken = rooms[1].taken(chunk.payload.bytes_there)
        assert taken is not None
        kv.unpack(range(2), kv.slots(BLOCKS, 0, 24), taken)
    words = 58 * 8
    assert sorted(sizes)[-1] <= words < len(chunk.payload)
    assert {counted.stream for counted in cuda.counts if counted.what == "launch"} == {"kv-out", "kv-in"}


def test_a_place_is_free_again_once_nobody_holds_its_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had it, and however that ended; without one KV passes through host memory."""
    monkeypatch.setattr(device_room, "PATIENCE", 0.01)
    cuda = FakeCuda(1, 0.3)
    with installed(cuda):
        kv, room = on_device(cuda, random_pool(LAYOUTS["bfloat16"], 6, 4, 1)), DeviceRoom(cuda, 2, BUFFER_BYTES)

        def encoded() -> Chunk:
            return encode(kv, lease_id(), "layout", range(2), BLOCKS, 2, 14, room=room)

        held = [encoded() for _ in range(3)]
        assert [isinstance(one.payload, DevicePayload) for one in held] == [True, True, False]
        assert len({one.digest for one in held}) == 1
        del held[1]
        gc.collect()
        assert isinstance(encoded().payload, DevicePayload)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceRoom, "digest", broken)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="no kernel"):
                    encoded()
        gc.collect()
        assert isinstance(encoded().payload, DevicePayload), "a copy that breaks off keeps no place"


def broken(*_: object) -> int:
    raise RuntimeError("no kernel")


def test_what_lies_otherwise_at_the_other_end_passes_through_host_memory() -> None:
    cuda = FakeCuda(1, 0.3)
    with installed(cuda):
        host = random_pool(LAYOUTS["float32"], 6, 4, 1)
        kv, room = on_device(cuda, host), DeviceRoom(cuda, 2, BUFFER_BYTES)
        cut = HeadSlice(0, range(1, 2), range(1), 2)
        chunk, wanted = (
            encode(one, lease_id(), "layout", range(2), BLOCKS, 2, 14, head_slice=cut, room=room) for one in (kv, host)
        )
        assert chunk == wanted and not chunk.whole
        large = DeviceRoom(cuda, 1, 64)
        assert isinstance(encode(kv, lease_id(), "layout", range(2), BLOCKS, 2, 14, room=large).payload, memoryview)


def test_bytes_that_have_changed_on_the_way_are_told() -> None:
    cuda = FakeCuda(1, 0.3)
    with installed(cuda):
        kv, room = on_device(cuda, random_pool(LAYOUTS["bfloat16"], 6, 4, 1)), DeviceRoom(cuda, 2, BUFFER_BYTES)
        chunk = encode(kv, lease_id(), "layout", range(2), BLOCKS, 2, 14, room=room)
        assert isinstance(chunk.payload, DevicePayload)
        buffer = cuda.room(BUFFER_BYTES)
        buffer[: len(chunk.payload)].copy_(chunk.payload.bytes_there)
        buffer[7:8].bitwise_xor_(1)
        cuda.finish()
        taken = room.taken(buffer[: len(chunk.payload)])
        assert taken is not None
        with pytest.raises(CorruptChunk, match="digest"):
            verify(replace(chunk, payload=taken), kv)


# ---- over NIXL -----------------------------------------------------------------------------------------------------


class OnDevice(Taking):
    """A decode worker's receiving half with blocks of its own on the device."""

    def __init__(self, kv: DeviceKV) -> None:
        super().__init__()
        self.kv, self.there = kv, 0

    async def receive(self, chunk: Chunk, via: str = "") -> None:
        await asyncio.to_thread(self._receive, chunk)
        await super().receive(replace(chunk, payload=b""), via)

    def _receive(self, chunk: Chunk) -> None:
        verify(chunk, self.kv)
        layers, there = range(chunk.first_layer, chunk.last_layer), packed(chunk, self.kv.specs)
        sequence, locations = make_sequence(None, [1] * chunk.end), KVLocations(self.kv)
        sequence.blocks = BLOCKS[::-1]
        found = locations.arriving(sequence, chunk.start, chunk.end)
        if there is not None and locations.unpack(found, layers, there):
            self.there += 1
        else:
            locations.write(found, layers, split(chunk, self.kv))


class World:
    """A sender and a receiver with a device each, which is one FakeCuda, and what the sender has on it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.host = cuda, random_pool(LAYOUTS["bfloat16"], 6, 4, 1)
        self.receiver = OnDevice(on_device(cuda, random_pool(LAYOUTS["bfloat16"], 6, 4, 2)))

    @asynccontextmanager
    async def dialing(self) -> AsyncIterator[tuple[Dialer, str]]:
        """A dialer on the device, and the address of the receiver, which lends memory of its own."""
        self.receiver.lenders = lenders_for("nixl", device_lenders("nixl", "cuda"))
        dialer, listening = Dialer(kv_transport="nixl", device="cuda"), server()
        try:
            await dialer.prepare()
            address = f"127.0.0.1:{listening.add_insecure_port('127.0.0.1:0')}"
            DecodeService(self.receiver).add_to(listening)  # type: ignore[arg-type]
            await listening.start()
            yield dialer, address
        finally:
            await dialer.close()
            await listening.stop(0)
            self.receiver.lenders.close()

    async def hand_over(self) -> None:
        sequence = make_sequence(None, [1] * TOKENS)
        sequence.blocks = BLOCKS
        async with self.dialing() as (dialer, address), asyncio.timeout(30):
            link = dialer.dial(granted(address, *self.receiver.lenders.offers))
            handoff = Handoff(on_device(self.cuda, self.host), link, sequence, lease_id(), "layout", 0)
            for layer in range(len(self.host.specs)):
                handoff.layer_done(layer, sequence.start)
            await handoff.send()
            await handoff.commit(7)
            await link.close()
            assert sequence.start == TOKENS
            await self.receiver.let_go()
        self.cuda.finish()

    def check(self) -> None:
        """The receiver has the sender's tokens in its own blocks."""
        layers, mine = range(len(self.host.specs)), back(self.cuda, self.receiver.kv)
        found = mine.read_all(layers, mine.slots(BLOCKS[::-1], 0, TOKENS))
        wanted = self.host.read_all(layers, self.host.slots(BLOCKS, 0, TOKENS))
        assert all(same_parts(*pair) for pair in zip(found, wanted, strict=True))
        assert self.receiver.chunks


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(nixl_device, "MEMORY", DRAM)
    cuda = FakeCuda(4, 0.4)
    with installed(cuda):
        yield World(cuda)


@needs_nixl
async def test_a_handoff_goes_from_device_to_device(world: World) -> None:
    await world.hand_over()
    world.check()
    assert world.receiver.there == len(world.receiver.chunks)
    assert set(world.receiver.via) == {nixl_device.KIND}


@needs_nixl
async def test_where_no_place_is_free_it_goes_through_host_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At either end: written from there into the device's buffers, and taken out of these by way of it."""
    monkeypatch.setattr(DeviceRoom, "free_place", lambda _: None)
    await world.hand_over()
    world.check()
    assert not world.receiver.there and set(world.receiver.via) == {nixl_device.KIND}


@needs_nixl
async def test_a_write_that_fails_sends_the_bytes_by_the_stream(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Callable[..., str] = Agent._begin

    def failing(self: Agent, write: Any) -> str:
        if write.peer != self.name:  # its probe goes
            raise RuntimeError("the link is down")
        return begin(self, write)

    monkeypatch.setattr(Agent, "_begin", failing)
    await world.hand_over()
    world.check()
    assert not world.receiver.there


@needs_nixl
@pytest.mark.parametrize("how", ["not moved", "no such memory", "no device's", "no room"])
def test_a_device_whose_memory_nixl_does_not_move_is_left_and_told_of_once(
    how: str, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "not moved":
        monkeypatch.setattr(Agent, "_over", lambda self, write, _: write.done.set_result(None) or True)
    elif how == "no room":
        monkeypatch.setattr(nixl_device, "DeviceRoom", _without_memory)
    else:  # UCX finds that what is called a device's is the host's, as it does where it lacks CUDA
        monkeypatch.setattr(nixl_device, "MEMORY", VRAM if how == "no device's" else how)
    with pytest.raises(TransferUnavailable):
        NixlDeviceLender("cuda")
    writers = NixlDeviceWriters("cuda")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            writers.prepare()
            with pytest.raises(TransferUnavailable):
                writers.writer(TransportOffer(kind=nixl_device.KIND, details=b""))
        lenders = lenders_for("nixl", device_lenders("nixl", "cuda"))
    assert caplog.text.count("KV leaves the device through host memory") == 1
    assert caplog.text.count("KV is not taken over nixl_device") == 1
    assert [offer.kind for offer in lenders.offers] == ["nixl"], "through host memory"
    lenders.close()
    writers.close()


def _without_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 MiB. GPU 0 has a total capacity of 9 GiB")


def test_only_devices_and_only_where_nixl_may_listen() -> None:
    for asked in (("grpc", "cuda"), ("host", "cuda"), ("shm", "cuda"), ("nixl", "cpu")):
        assert not nixl_device.serves(*asked)
        assert device_lenders(*asked) == nixl_device.device_writers(*asked) == {}
