"""KV packed and unpacked by one launch, on a device that does its work late: the bytes are those of host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvcache.handoff.chunk import encode
from kvcache.memory import kv_copies, ranked_kv
from kvcache.memory.device import DeviceKV
from kvcache.memory.ranked_kv import CopyHeads, HeldHeads, RankedCopies, kept_by
from serving.engine.engine import Engine
from serving.engine.overlap import OverlapEngine
from serving.engine.sequence import SequenceState
from serving.kvspec import AUTO, gqa
from serving.shared_memory import FIRST_BYTE
from tests.fakes.kv_layouts import LAYOUTS, WITH_ROOM, all_bytes, random_pool, same_parts
from tests.fakes.sequences import lease_id
from tests.gpu.fake_cuda import FakeCuda, installed
from tests.gpu.late_forward import kv_of
from tests.gpu.test_order import ORDERS
from tests.gpu.watching_worker import SIZE, Worker

POOLS = {**LAYOUTS, **{f"{name}, int8 within": specs for name, specs in WITH_ROOM.items()}}


def both(name: str, cuda: FakeCuda, seed: int) -> tuple[DeviceKV, DeviceKV]:
    """A pool of random bytes in host memory, and the same on the device."""
    host = random_pool(POOLS[name], 6, 3, seed)
    planes = [tuple(map(cuda.tensor, layer)) for layer in host.planes]
    return host, DeviceKV(host.specs, 6, 3, planes=planes)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("place_bytes", [4 << 20, 500])
@settings(max_examples=2, deadline=None, phases=[Phase.generate])  # shrinking takes minutes, interpreted
@given(cuda=ORDERS, data=st.data())
def test_rows_come_and_go_as_in_host_memory(name: str, place_bytes: int, cuda: FakeCuda, data: st.DataObject) -> None:
    """In one piece, and in many small ones."""
    with installed(cuda), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_copies, "PLACE_BYTES", place_bytes)
        blocks = both(name, cuda, 1)
        host, device = (one.kept_as("int8" if "int8 within" in name else AUTO) for one in blocks)
        assert host.in_host_memory and not device.in_host_memory
        start = data.draw(st.integers(0, 16))
        slots = host.slots(data.draw(st.permutations(range(6))), start, data.draw(st.integers(start + 1, 18)))
        first = data.draw(st.integers(0, len(host.specs) - 1))
        layers = range(first, data.draw(st.integers(first + 1, len(host.specs))))
        found, wanted = device.read_all(layers, slots), host.read_all(layers, slots)
        assert all(same_parts(*pair) for pair in zip(found, wanted, strict=True))
        other = random_pool(host.specs, 6, 3, 2)
        values = other.read_all(layers, slots)
        host.write_all(layers, slots, values)
        device.write_all(layers, slots, values)
        there = [tuple(cuda.peek(plane) for plane in layer) for layer in blocks[1].planes]
        assert all_bytes(DeviceKV(blocks[0].specs, 6, 3, planes=there)) == all_bytes(blocks[0])


@pytest.mark.parametrize("name", ["float32", "int8 and scales", "bfloat16"])
def test_a_chunk_and_its_digest_are_those_of_host_memory(name: str) -> None:
    """Also where the device digests nothing: of bytes that are no multiple of eight."""
    cuda = FakeCuda(2, 0.3)
    with installed(cuda):
        host, device = both(name, cuda, 3)
        layers, blocks = range(len(host.specs)), [3, 1, 5, 0, 2, 4]
        chunk, wanted = (encode(one, lease_id(), "layout", layers, blocks, 2, 13) for one in (device, host))
    assert chunk == wanted and len(wanted.payload) % 8 == (6 if name == "int8 and scales" else 0)
    assert cuda.total("launch") == (1 if len(wanted.payload) % 8 else 2)


def test_threads_share_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(3, 0.4)
    with installed(cuda):
        host, device = both("bfloat16", cuda, 5)
        spans = [(start, start + 1 + start % 4) for start in range(14)]
        slots = [host.slots([3, 1, 5, 0, 2, 4], start, end) for start, end in spans]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda one: device.read_all(range(2), one), slots))
    for one, read in zip(slots, found, strict=True):
        assert all(same_parts(*pair) for pair in zip(read, host.read_all(range(2), one), strict=True))
    assert cuda.total("launch") == len(spans), "a launch for all layers"
    assert {counted.stream for counted in cuda.counts} == {"kv-out"}, "nothing on the stream of the steps"


@pytest.mark.parametrize("lane_bytes", [4 << 20, 500])
def test_ranks_copy_their_heads_beside_the_steps(lane_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from its own device, to where one process has them; and back."""
    monkeypatch.setattr(ranked_kv, "LANE_BYTES", lane_bytes)
    cuda, specs = FakeCuda(4, 0.3), (gqa(3, 8, "bfloat16"),) * 2
    host = random_pool(specs, 6, 3, 1)
    with installed(cuda):
        memory = np.zeros(FIRST_BYTE + 2 * lane_bytes, np.uint8)
        held = []
        for rank in range(2):
            own = DeviceKV(kept_by(rank, 2, specs), 6, 3)
            planes = [tuple(map(cuda.tensor, layer)) for layer in own.planes]
            held.append(HeldHeads(specs, DeviceKV(own.specs, 6, 3, planes=planes), rank, 2, memory))
        copies = RankedCopies(specs, held[0], 2, SameProcess(held))
        slots = host.slots([3, 1, 5, 0, 2, 4], 2, 17)
        values = host.read_all(range(2), slots)
        flat = [part.numpy() for layer in values for part in layer]
        copies.put(range(2), slots, flat)
        found = [np.empty(part.size, np.uint8) for part in flat]
        copies.take(range(2), slots, found)
    assert same_parts(found, [part.reshape(-1) for part in flat])
    assert {counted.stream for counted in cuda.counts} == {"kv-out", "kv-in"}, "nothing on the stream of the steps"


class SameProcess:
    """Lanes to ranks of this process (kvcache.memory.ranked_kv.RankLanes)."""

    count, number = 2, 1

    def __init__(self, held: list[HeldHeads]) -> None:
        self.held = held

    @contextmanager
    def one(self) -> Iterator[SameProcess]:
        yield self

    def together(self, ranks: Collection[int], word: CopyHeads, own: Callable[[], object]) -> None:
        own()
        for rank in set(ranks) - {0}:
            self.held[rank].does(word)


class Copying(Worker):
    """Copies KV, on a stream of its own, as soon as it is published; beside the engine, as handoffs and the pool do."""

    copied = 0

    def look(self, seq: SequenceState, start: int, end: int) -> None:
        if start == end:
            return
        slots = self.device_kv.slots(seq.blocks, start, end)
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(self.device_kv.read_all, range(len(self.device_kv.specs)), slots).result()
        for layer, planes in enumerate(found):
            wanted = [kv_of(seq.tokens[position], position, layer) for position in range(start, end)]
            assert all(plane.view(torch.float32).tolist() == wanted for plane in planes)
        self.copied += end - start


@pytest.mark.parametrize("kind", [Engine, OverlapEngine])
@pytest.mark.parametrize(("seed", "eager"), [(0, 0.0), (1, 0.3), (2, 0.8)])
def test_what_is_published_can_be_copied_beside_the_steps(kind: type[Engine], seed: int, eager: float) -> None:
    cuda = FakeCuda(seed, eager)
    with installed(cuda), torch.inference_mode():
        worker = Copying(cuda, kind)
        worker.serve([37, 5], 3)
    assert worker.copied >= 42 // SIZE * SIZE
    names = {counted.thread for counted in cuda.counts if counted.stream == "kv-out"}
    assert threading.current_thread().name not in names, "no copy waits in the engine's thread"
