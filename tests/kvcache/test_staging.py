"""The bytes of host offload: what has moved comes back whole and in order, each piece untouched while it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcache.device import DevicePool
from kvcache.host import HostPlan
from kvcache.staging import BUFFERS, Copier, HostKV, pieces
from serving.engine.spill import Move, Spill
from serving.kvspec import gqa, gqa_int8

PLAN = HostPlan(block_size=4, device_blocks=40, extent_blocks=2, extents=9, piece_extents=2)
MOVED = {3: (5, 6), 8: (0, 39), 1: (17, 2), 7: (11, 10), 0: (30, 31)}  # extent → device blocks, oldest first


def filled(windows: tuple[int | None, ...], plan: HostPlan = PLAN) -> tuple[HostKV, DevicePool]:
    """A device pool full of numbers, of layers of two kinds, with some of it moved."""
    specs = (gqa(2, 3, "float32"), gqa_int8(2, 3), gqa(2, 3, "float32"))
    pool = DevicePool(specs, plan.device_blocks, plan.block_size)
    for planes in pool.planes:
        for plane in planes:
            plane.copy_(torch.randint(-100, 100, plane.shape))
    host = HostKV(plan, pool, windows)
    host.move([Move(blocks, extent) for extent, blocks in MOVED.items()])
    return host, pool


def expected(pool: DevicePool, layer: int) -> list[torch.Tensor]:
    """The planes of all moved tokens, in their order."""
    blocks = torch.tensor([block for moved in MOVED.values() for block in moved])
    return [plane[blocks].flatten(0, 1) for plane in pool.planes[layer]]


@pytest.mark.parametrize("piece_extents", [1, 2, 3, 7])
def test_what_has_moved_comes_back_layer_by_layer(piece_extents: int) -> None:
    host, pool = filled((None, None, None), replace(PLAN, piece_extents=piece_extents))
    kept = [[plane.clone() for plane in expected(pool, layer)] for layer in range(3)]
    for planes in pool.planes:
        for plane in planes:
            plane.zero_()  # the device's blocks are used again
    spill = Spill(PLAN.extent_blocks, list(MOVED), moved=len(MOVED))
    for _ in range(2):  # a second step reads the same
        with host.stream(spill, computed=60) as earlier:
            assert earlier.tokens == 40
            for layer in range(3):
                found: list[list[torch.Tensor]] = [[] for _ in kept[layer]]
                position = 0
                for piece in earlier.pieces():
                    assert piece.first == position
                    position += piece.tokens
                    for parts, plane in zip(found, piece.planes, strict=True):
                        parts.append(plane.flatten(0, 1).clone())
                assert position == 40
                for parts, whole in zip(found, kept[layer], strict=True):
                    assert torch.equal(torch.cat(parts), whole)
    assert host.bytes_in == 2 * host.bytes_out > 0


def test_a_windowed_layer_reads_only_what_it_sees() -> None:
    host, _ = filled((None, 10, 100))
    spill = Spill(PLAN.extent_blocks, list(MOVED), moved=4)
    with host.stream(spill, computed=33) as earlier:
        starts = [[(piece.first, piece.tokens) for piece in earlier.pieces()] for _ in range(3)]
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
    with host.stream(Spill(PLAN.extent_blocks, list(MOVED), moved=5), computed=60) as earlier:
        for _ in range(3):
            for piece in earlier.pieces():
                before = [plane.clone() for plane in piece.planes]
                assert all(map(torch.equal, before, piece.planes))
            assert copier.state.count("filled") > 0 or len(copier.ahead) == 9, "the next layer's come meanwhile"
    assert copier.ahead == [1] * 8 + [0], "every piece but the last had the next one copied beside it"


def test_a_copy_that_fails_is_told_and_ends() -> None:
    host, _ = filled((None, None, None))
    spill = Spill(PLAN.extent_blocks, [*MOVED, 99], moved=6)
    with pytest.raises(IndexError), host.stream(spill, computed=60) as earlier:
        for _ in earlier.pieces():
            pass
    with host.stream(Spill(PLAN.extent_blocks, list(MOVED), moved=1), computed=60) as earlier:
        assert sum(piece.tokens for _ in range(3) for piece in earlier.pieces()) == 3 * 8


def test_stretches() -> None:
    assert list(pieces(7, 3, 0)) == [(0, 3), (3, 6), (6, 7)]
    assert list(pieces(7, 3, 5)) == [(5, 7)] and list(pieces(0, 3, 0)) == []
