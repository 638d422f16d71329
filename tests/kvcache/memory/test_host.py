"""The bytes of host offload: what has moved comes back whole and in order, each segment untouched while it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcache.blocks.offload import OffloadPlan
from kvcache.memory.device import DeviceKV
from kvcache.memory.host import BUFFERS, Copier, HostKV, segments
from serving.engine.offload import OffloadMove, OffloadState
from serving.kvspec import gqa, gqa_int8

PLAN = OffloadPlan(block_size=4, device_blocks=40, extent_blocks=2, extents=9, segment_extents=2)
MOVED = {3: (5, 6), 8: (0, 39), 1: (17, 2), 7: (11, 10), 0: (30, 31)}  # extent → device blocks, oldest first


def filled(windows: tuple[int | None, ...], plan: OffloadPlan = PLAN) -> tuple[HostKV, DeviceKV]:
    """A device pool full of numbers, of layers of two kinds, with some of it moved."""
    specs = (gqa(2, 3, "float32"), gqa_int8(2, 3), gqa(2, 3, "float32"))
    device_kv = DeviceKV(specs, plan.device_blocks, plan.block_size)
    for planes in device_kv.planes:
        for plane in planes:
            plane.copy_(torch.randint(-100, 100, plane.shape))
    host = HostKV(plan, device_kv, windows)
    host.move([OffloadMove(blocks, extent) for extent, blocks in MOVED.items()])
    return host, device_kv


def expected(device_kv: DeviceKV, layer: int) -> list[torch.Tensor]:
    """The planes of all moved tokens, in their order."""
    blocks = torch.tensor([block for moved in MOVED.values() for block in moved])
    return [plane[blocks].flatten(0, 1) for plane in device_kv.planes[layer]]


@pytest.mark.parametrize("segment_extents", [1, 2, 3, 7])
def test_what_has_moved_comes_back_layer_by_layer(segment_extents: int) -> None:
    host, device_kv = filled((None, None, None), replace(PLAN, segment_extents=segment_extents))
    kept = [[plane.clone() for plane in expected(device_kv, layer)] for layer in range(3)]
    for planes in device_kv.planes:
        for plane in planes:
            plane.zero_()  # the device's blocks are used again
    offload = OffloadState(PLAN.extent_blocks, list(MOVED), moved=len(MOVED))
    for _ in range(2):  # a second step reads the same
        with host.stream(offload, computed=60) as offloaded:
            assert offloaded.tokens == 40
            for layer in range(3):
                found: list[list[torch.Tensor]] = [[] for _ in kept[layer]]
                position = 0
                for segment in offloaded.segments():
                    assert segment.first == position
                    position += segment.tokens
                    for parts, plane in zip(found, segment.planes, strict=True):
                        parts.append(plane.flatten(0, 1).clone())
                assert position == 40
                for parts, whole in zip(found, kept[layer], strict=True):
                    assert torch.equal(torch.cat(parts), whole)
    assert host.bytes_in == 2 * host.bytes_out > 0


def test_a_windowed_layer_reads_only_what_it_sees() -> None:
    host, _ = filled((None, 10, 100))
    offload = OffloadState(PLAN.extent_blocks, list(MOVED), moved=4)
    with host.stream(offload, computed=33) as offloaded:
        starts = [[(segment.first, segment.tokens) for segment in offloaded.segments()] for _ in range(3)]
    assert starts == [[(0, 16), (16, 16)], [(24, 8)], [(0, 16), (16, 16)]]


class ImpatientCopier(Copier):
    """Copies at once, and notes that a buffer is filled only when nobody reads it, and ahead of time."""

    def __init__(self) -> None:
        self.state = ["free"] * BUFFERS
        self.ahead: list[int] = []

    def begin(self) -> None:
        self.state = ["free"] * BUFFERS

    def start(self, buffer: int, copy: Callable[[], None]) -> None:
        assert self.state[buffer] == "free"
        copy()
        self.state[buffer] = "filled"

    def wait(self, buffer: int) -> None:
        assert self.state[buffer] == "filled"
        self.state[buffer] = "read"
        self.ahead.append(self.state.count("filled"))

    def free(self, buffer: int) -> None:
        assert self.state[buffer] == "read"
        self.state[buffer] = "free"

    def end(self) -> None: ...


def test_the_next_piece_is_on_its_way_while_one_is_read() -> None:
    host, _ = filled((None, None, None))
    copier = host.copier = ImpatientCopier()
    with host.stream(OffloadState(PLAN.extent_blocks, list(MOVED), moved=5), computed=60) as offloaded:
        for _ in range(3):
            for segment in offloaded.segments():
                before = [plane.clone() for plane in segment.planes]
                assert all(map(torch.equal, before, segment.planes))
            assert copier.state.count("filled") > 0 or len(copier.ahead) == 9, "the next layer's come meanwhile"
    assert copier.ahead == [1] * 8 + [0], "every segment but the last had the next one copied beside it"


def test_a_copy_that_fails_is_told_and_ends() -> None:
    host, _ = filled((None, None, None))
    offload = OffloadState(PLAN.extent_blocks, [*MOVED, 99], moved=6)
    with pytest.raises(IndexError), host.stream(offload, computed=60) as offloaded:
        for _ in offloaded.segments():
            pass
    with host.stream(OffloadState(PLAN.extent_blocks, list(MOVED), moved=1), computed=60) as offloaded:
        assert sum(segment.tokens for _ in range(3) for segment in offloaded.segments()) == 3 * 8


def test_stretches() -> None:
    assert list(segments(7, 3, 0)) == [(0, 3), (3, 6), (6, 7)]
    assert list(segments(7, 3, 5)) == [(5, 7)] and list(segments(0, 3, 0)) == []
