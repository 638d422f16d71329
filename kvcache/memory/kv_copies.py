"""Copies token ranges of paged planes out of and into blocks as bytes: by numpy in host memory, else on streams.

On a device nothing here waits for what it computes: copies run on streams of their own, and the calling thread waits
for its own copy. So the KV that is read must be known to be there, and blocks that are written belong to no step.
Not under a lock, nor on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from math import gcd
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.device_room import DevicePayload, DeviceRoom
from kvcache.memory.host_copy import Bytes, cells_of, shaped, take_blocks
from kvcache.memory.packed_planes import PackedPlanes, Piece
from kvcache.memory.staging_ring import KV_AT, MOST_BLOCKS, PLACE_BYTES, StagingPlace, ring_of, there_for_all
from kvcache.memory.token_slots import TokenSlots
from serving.kvspec import LayerKV
from serving.streams import IMMEDIATE, Streams, streams_of

WIDEST_UNIT = 8  # bytes


class KVCopies(Protocol):
    """Copies of one pool's planes; layers and tokens are counted as it does."""

    def take(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> None:
        """The layers' planes, layer by layer, each token by token to its `out`, uint8 [tokens * bytes of a row]."""
        ...

    def take_digested(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> bytes | None:
        """`take`, and the digests of the leaves of all `out` in a row, if they were computed beside it.

        Leaves are those of kvcache.handoff.tree_digest.
        """
        ...

    def put(self, layers: range, slots: TokenSlots, parts: Sequence[Bytes]) -> None:
        """The inverse; parts are contiguous."""
        ...

    def pack(self, layers: range, slots: TokenSlots, room: DeviceRoom) -> DevicePayload | None:
        """`take_digested` to a place of the device's; None where it does not lie there, or finds no place."""
        ...

    def unpack(self, layers: range, slots: TokenSlots, payload: DevicePayload) -> None:
        """The inverse, of a payload on the planes' device with the bytes of these layers and slots."""
        ...


def copies_of(specs: Sequence[LayerKV], planes: Sequence[tuple[Tensor, ...]]) -> KVCopies:
    streams = streams_of(planes[0][0].device) if planes else IMMEDIATE
    return HostCopies(planes) if streams is IMMEDIATE else StreamCopies(specs, planes, streams)


class HostCopies(KVCopies):
    """In host memory."""

    def __init__(self, planes: Sequence[tuple[Tensor, ...]]) -> None:
        self.planes = planes

    def take(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> None:
        for plane, rows in zip(self._planes(layers), out, strict=True):
            cells = cells_of(plane)
            for where, into in slots.stretches(shaped(rows, cells)):
                if isinstance(where, np.ndarray):
                    take_blocks(cells, where, into)
                else:
                    into[...] = cells[where]

    def take_digested(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> None:
        self.take(layers, slots, out)

    def put(self, layers: range, slots: TokenSlots, parts: Sequence[Bytes]) -> None:
        for plane, rows in zip(self._planes(layers), parts, strict=True):
            cells = cells_of(plane)
            for where, given in slots.stretches(shaped(rows.reshape(-1), cells)):
                cells[where] = given

    def pack(self, layers: range, slots: TokenSlots, room: DeviceRoom) -> None:
        """It lies in host memory."""

    def unpack(self, layers: range, slots: TokenSlots, payload: DevicePayload) -> None:
        raise AssertionError("nothing comes to host memory by a device")

    def _planes(self, layers: range) -> list[Tensor]:
        return [plane for layer in layers for plane in self.planes[layer]]


class StreamCopies(KVCopies):
    """On a device: one launch packs or unpacks all layers of a piece, and one copy takes it over."""

    def __init__(self, specs: Sequence[LayerKV], planes: Sequence[tuple[Tensor, ...]], streams: Streams) -> None:
        self.planes = planes
        self.streams = streams
        self.packed = PackedPlanes(specs)

    def take(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> None:
        for piece in self._pieces(layers, slots):
            self._take(layers, piece, out, digested=False)

    def take_digested(self, layers: range, slots: TokenSlots, out: Sequence[Bytes]) -> bytes | None:
        pieces = list(self._pieces(layers, slots))
        if len(pieces) == 1 and self.packed.size(pieces[0]) % 8 == 0:
            from serving.kernels.gpu.leaf_digests import as_digests

            return as_digests(self._take(layers, pieces[0], out, digested=True))
        self.take(layers, slots, out)
        return None

    def _take(self, layers: range, piece: Piece, out: Sequence[Bytes], *, digested: bool) -> bytes:
        """What the device has written of the piece's digests, where they are asked for."""
        from serving.kernels.gpu.kv_rows import gather  # it imports triton, which is not everywhere

        ring, first, size = ring_of(self.streams), self.packed.first_plane[layers.start], self.packed.size(piece)
        with ring.place(ring.outward) as place:
            self._named(place, piece.slots)
            self._launch(gather, place, piece)
            digests = self._digest(place, size) if digested else 0
            place.download(KV_AT - digests, KV_AT + size)
            place.wait()
            for plane, here, there in self.packed.stretches(piece):
                out[plane - first][there] = place.kv[here]
            return place.host[KV_AT - digests : KV_AT].numpy().tobytes()

    def _digest(self, place: StagingPlace, size: int) -> int:
        """Have the leaves of a place's KV digested, into what is right before it; how many bytes that takes."""
        from serving.kernels.gpu.leaf_digests import DIGEST_BYTES, LEAF, leaf_digests

        digests = -(-size // LEAF) * DIGEST_BYTES
        into = place.device[KV_AT - digests : KV_AT]
        words = ring_of(self.streams).digest_words
        self.streams.launch(partial(leaf_digests, size=size), words, place.device[KV_AT:], into)
        return digests

    def pack(self, layers: range, slots: TokenSlots, room: DeviceRoom) -> DevicePayload | None:
        from serving.kernels.gpu.kv_rows import gather
        from serving.kernels.gpu.leaf_digests import as_digests

        pieces = list(self._pieces(layers, slots))
        place = room.free_place() if len(pieces) == 1 and room.takes(self.packed.size(pieces[0])) else None
        if place is None:
            return None
        payload = room.payload(place, self.packed.size(pieces[0]), b"")
        with room.working(place, ring_of(self.streams).outward):
            self._named(place, slots)
            self._launch(gather, place, pieces[0])
            digests = room.digest(place, payload.size)
            place.download(KV_AT - digests, KV_AT)
        payload.leaves = as_digests(place.host[KV_AT - digests : KV_AT].numpy().tobytes())
        return payload

    def unpack(self, layers: range, slots: TokenSlots, payload: DevicePayload) -> None:
        from serving.kernels.gpu.kv_rows import scatter

        [piece] = self._pieces(layers, slots)
        assert payload.size == self.packed.size(piece)
        with payload.room.working(payload.place, ring_of(self.streams).inward) as place:
            self._named(place, slots)
            self._launch(scatter, place, piece)

    def _named(self, place: StagingPlace, slots: TokenSlots) -> None:
        """The copy's blocks, in the place on the device."""
        place.name(slots.blocks)
        place.upload(0, 8 * len(slots.blocks))

    def put(self, layers: range, slots: TokenSlots, parts: Sequence[Bytes]) -> None:
        from serving.kernels.gpu.kv_rows import scatter

        ring, first = ring_of(self.streams), self.packed.first_plane[layers.start]
        for piece in self._pieces(layers, slots):
            with ring.place(ring.inward) as place:
                place.name(piece.slots.blocks)
                for plane, here, there in self.packed.stretches(piece):
                    place.kv[here] = parts[plane - first].reshape(-1)[there]
                place.upload(0, KV_AT + self.packed.size(piece))
                self._launch(scatter, place, piece)
                place.wait()

    def _launch(self, kernel: Callable[..., None], place: StagingPlace, piece: Piece) -> None:
        from serving.kernels.gpu.kv_rows import PackedRows

        planes, slots = self.packed.planes(piece.layers), piece.slots
        rows = PackedRows(
            first=planes.start,
            planes=len(planes),
            widest=max(self.packed.row_bytes[plane] for plane in planes),
            tokens=slots.tokens,
            offset=slots.offset,
            block_size=slots.block_size,
            unit=self._unit,
        )
        blocks = place.device[: 8 * len(slots.blocks)].view(torch.int64)
        self.streams.launch(partial(kernel, rows=rows), self._table, blocks, place.device[KV_AT:])

    def _pieces(self, layers: range, slots: TokenSlots) -> Iterator[Piece]:
        return self.packed.pieces(layers, slots, PLACE_BYTES, (MOST_BLOCKS - 1) * slots.block_size)

    @cached_property
    def _fields(self) -> list[tuple[int, ...]]:
        """The table of serving.kernels.gpu.kv_rows, a plane each."""
        fields: list[tuple[int, ...]] = []
        begin = 0
        for plane in (plane for layer in self.planes for plane in layer):
            address, item = self.streams.address(plane), plane.element_size()
            fields.append((address, plane.stride(1) * item, *runs_of(plane), begin))
            begin += self.packed.row_bytes[len(fields) - 1]
        return fields

    @cached_property
    def _unit(self) -> int:
        """How many bytes may be copied at once, wherever they lie."""
        lengths = [(address, slot, size, stride) for address, slot, _, size, stride, _ in self._fields]
        return gcd(WIDEST_UNIT, *chain.from_iterable(lengths))

    @cached_property
    def _table(self) -> Tensor:
        return there_for_all(self.streams, torch.tensor(self._fields, dtype=torch.int64))


def runs_of(plane: Tensor) -> tuple[int, int, int]:
    """A token's bytes in a plane [num_blocks, block_size, ...]: how many runs, bytes of a run, bytes between two."""
    item = plane.element_size()
    assert plane.stride(0) == plane.stride(1) * plane.shape[1], "slots must be evenly spaced"
    if plane.is_contiguous():
        size = plane[0, 0].numel() * item
        return 1, size, size
    rows = plane.flatten(0, 1)[0]
    if plane.stride(-1) == 1:
        rows = rows.view(-1, rows.shape[-1])
        return rows.shape[0], rows.shape[1] * item, rows.stride(0) * item
    rows = rows.view(-1)
    return rows.shape[0], item, rows.stride(0) * item
