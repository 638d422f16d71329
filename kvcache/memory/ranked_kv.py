"""KV of which each rank of a worker keeps some heads on a device of its own: whole to whoever copies it in the leader.

What leaves or comes passes through memory of the host that all ranks map, a few MiB. There it lies packed as one
process has it, heads side by side: each rank copies its own out of its device to their places, or from there into its
device, all ranks at once. They are told by lanes beside their steps (serving.rank_group.beside).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from kvcache.memory.device_room import DevicePayload, DeviceRoom
from kvcache.memory.heads import slice_map
from kvcache.memory.host_copy import Bytes
from kvcache.memory.kv_copies import KVCopies
from kvcache.memory.packed_planes import PackedPlanes, Piece
from kvcache.memory.token_slots import TokenSlots
from serving.errors import WorkerLost
from serving.expert_parallel.exchange import RankLost
from serving.kvspec import LayerKV, heads_of, with_heads
from serving.shared_memory import FIRST_BYTE, Segment, SegmentUnavailable, mapped

LANE_BYTES = 4 << 20  # of KV that a lane takes at once: a chunk of a handoff has about half
MOST_TOKENS = 1 << 16  # of one piece
LEADER = 0


class RankLane(Protocol):
    """A way to the other ranks that one thread has to itself. `number` is its own among the lanes."""

    number: int

    def together(self, ranks: Collection[int], word: object, own: Callable[[], object]) -> None:
        """Have these of the other ranks do `word` while `own` is done here, until all is. Raises RankLost."""
        ...


class RankLanes(Protocol):
    """All lanes of a worker."""

    count: int

    def one(self) -> AbstractContextManager[RankLane]:
        """Waits until one is free. Raises RankLost."""
        ...


def kept_by(rank: int, ranks: int, specs: Sequence[LayerKV]) -> tuple[LayerKV, ...]:
    """What of each layer this rank keeps: its heads, or all where planes have no axis of heads."""
    return tuple(
        spec if spec.heads is None else with_heads(spec, len(heads_of(spec.heads, rank, ranks))) for spec in specs
    )


@dataclass(frozen=True, slots=True)
class CopyHeads:
    """Copy a rank's heads of these layers and tokens to the lane's memory (`take`), or from there."""

    take: bool
    layers: range
    slots: TokenSlots
    lane: int


class HeldHeads:
    """One rank's KV, and what it copies of it. `whole` are the layers with all heads, `memory` the segment of lanes."""

    def __init__(self, whole: Sequence[LayerKV], own: DeviceKV, rank: int, ranks: int, memory: Bytes) -> None:
        [heads] = {spec.heads or 1 for spec in whole}
        self.whole, self.own, self.memory = whole, own, memory
        self._leaving = [part for part in slice_map(heads, ranks, 1)[0] if part.rank == rank]
        [self._coming] = slice_map(heads, 1, ranks)[rank]

    @property
    def planes(self) -> list[tuple[Tensor, ...]]:
        return self.own.planes

    def does(self, word: CopyHeads) -> None:
        """The calling thread waits for the copy."""
        if word.take:
            self._take(word)
        else:
            heads = slice(self._coming.heads.start, self._coming.heads.stop)
            parts = [[np.ascontiguousarray(plane[:, heads]) for plane in planes] for planes in self._in_lane(word)]
            self.own.write_all(word.layers, word.slots, parts)

    def _take(self, word: CopyHeads) -> None:
        for into, parts in zip(self._in_lane(word), self.own.read_all(word.layers, word.slots), strict=True):
            for plane, part in zip(into, parts, strict=True):
                rows = part.numpy().reshape(len(part), -1, plane.shape[-1])
                for piece in self._leaving:
                    plane[:, piece.place.start : piece.place.stop] = rows[:, piece.heads.start : piece.heads.stop]

    def _in_lane(self, word: CopyHeads) -> list[list[Bytes]]:
        """The planes of each layer as they lie packed in the lane's memory: uint8 [tokens, heads, bytes of one]."""
        start, found = first_byte(word.lane), list[list[Bytes]]()
        for spec in self.whole[word.layers.start : word.layers.stop]:
            planes: list[Bytes] = []
            for plane in spec.planes:
                size = word.slots.tokens * plane.token_bytes
                rows = self.memory[start : start + size]
                planes.append(rows.reshape(word.slots.tokens, spec.heads or 1, -1))
                start += size
            found.append(planes)
        return found


def first_byte(lane: int) -> int:
    """Where a lane's memory begins in the segment."""
    return FIRST_BYTE + lane * LANE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepHeads:
    """Makes the KV of a rank but the leader, in its process (serving.rank_group.device_messages.KeepKV)."""

    whole: tuple[LayerKV, ...]
    num_blocks: int
    block_size: int
    rank: int
    ranks: int
    segment: bytes

    def __call__(self, device: torch.device) -> HeldHeads:
        """Raises ValueError where the leader's memory cannot be had."""
        try:
            memory = mapped(self.segment)
        except SegmentUnavailable as error:
            raise ValueError(f"KV cannot leave this rank: {error}") from error
        own = DeviceKV(kept_by(self.rank, self.ranks, self.whole), self.num_blocks, self.block_size, device)
        return HeldHeads(self.whole, own, self.rank, self.ranks, memory)


class RankedKV(DeviceKV):
    """The leader's. `specs` are the layers with all heads, and so is what is copied; `planes` have the leader's own."""

    def __init__(
        self,
        specs: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        *,
        ranks: int,
        lanes: RankLanes,
    ) -> None:
        own = DeviceKV(kept_by(LEADER, ranks, specs), num_blocks, block_size, device)
        super().__init__(specs, num_blocks, block_size, planes=own.planes)
        self._segment = Segment(lanes.count * LANE_BYTES, "millrace-ranks-kv")
        weakref.finalize(self, self._segment.close).atexit = False
        self._held = HeldHeads(self.specs, own, LEADER, ranks, self._segment.memory)
        self._ranks, self._lanes = ranks, lanes

    def keep(self, rank: int) -> KeepHeads:
        """What makes another rank's."""
        return KeepHeads(
            whole=self.specs,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            rank=rank,
            ranks=self._ranks,
            segment=self._segment.details,
        )

    def can_keep(self, kv_dtype: str) -> bool:
        """Each rank's forward pass is made over the one KV that it has."""
        return False

    @cached_property
    def copies(self) -> KVCopies:
        return RankedCopies(self.specs, self._held, self._ranks, self._lanes)


class RankedCopies(KVCopies):
    """Of whole KV, by all ranks. What is copied raises WorkerLost once one of them is lost."""

    def __init__(self, specs: Sequence[LayerKV], own: HeldHeads, ranks: int, lanes: RankLanes) -> None:
        self._packed, self._own, self._lanes = PackedPlanes(specs), own, lanes
        leaving = slice_map(specs[0].heads or 1, ranks, 1)[0]  # of those that keep a head one sends it
        self._senders, self._all = frozenset(part.rank for part in leaving), range(ranks)

    def take(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> None:
        first = self._packed.first_plane[layers.start]
        for piece in self._pieces(layers, slots):
            with self._lane() as lane:
                self._copy(lane, self._senders, piece, take=True)
                there = self._memory(lane)
                for plane, here, rows in self._packed.stretches(piece):
                    out[plane - first][rows] = there[here]

    def take_digested(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> None:
        """The digests are the host's to compute: each device has some of what a leaf covers."""
        self.take(layers, slots, out)

    def put(self, layers: range, slots: TokenSlots, parts: Sequence[Bytes]) -> None:
        first = self._packed.first_plane[layers.start]
        for piece in self._pieces(layers, slots):
            with self._lane() as lane:
                there = self._memory(lane)
                for plane, here, rows in self._packed.stretches(piece):
                    there[here] = parts[plane - first].reshape(-1)[rows]
                self._copy(lane, self._all, piece, take=False)

    def pack(self, layers: range, slots: TokenSlots, room: DeviceRoom) -> None:
        """It lies on several devices, and leaves through the host."""

    def unpack(self, layers: range, slots: TokenSlots, payload: DevicePayload) -> None:
        raise AssertionError("nothing comes to several devices by one of them")

    def _pieces(self, layers: range, slots: TokenSlots) -> Iterator[Piece]:
        return self._packed.pieces(layers, slots, LANE_BYTES, MOST_TOKENS)

    def _memory(self, lane: RankLane) -> Bytes:
        start = first_byte(lane.number)
        return self._own.memory[start : start + LANE_BYTES]

    def _copy(self, lane: RankLane, ranks: Collection[int], piece: Piece, *, take: bool) -> None:
        word = CopyHeads(take, piece.layers, piece.slots, lane.number)
        lane.together(ranks, word, partial(self._own.does, word))

    @contextmanager
    def _lane(self) -> Iterator[RankLane]:
        try:
            with self._lanes.one() as lane:
                yield lane
        except RankLost as lost:
            raise WorkerLost(f"its KV cannot be copied: {lost}") from lost
