"""How the planes of some layers lie in one piece of memory as they are copied: one after another, token by token.

What is larger than that memory is copied in pieces. Pure numbers: it moves no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvcache.memory.token_slots import TokenSlots
from serving.kvspec import LayerKV


@dataclass(frozen=True, slots=True)
class Piece:
    """What is copied at once: tokens first.. of a copy, of these layers."""

    layers: range
    first: int
    slots: TokenSlots


class PackedPlanes:
    """Of the layers `specs`, whose planes are counted through."""

    def __init__(self, specs: Sequence[LayerKV]) -> None:
        self.layer_bytes = [spec.token_bytes for spec in specs]  # of a token
        self.first_plane = list(accumulate((len(spec.planes) for spec in specs), initial=0))
        self.row_bytes = [plane.token_bytes for spec in specs for plane in spec.planes]

    def planes(self, layers: range) -> range:
        return range(self.first_plane[layers.start], self.first_plane[layers.stop])

    def size(self, piece: Piece) -> int:
        """Bytes."""
        return piece.slots.tokens * sum(self.layer_bytes[piece.layers.start : piece.layers.stop])

    def pieces(self, layers: range, slots: TokenSlots, most_bytes: int, most_tokens: int) -> Iterator[Piece]:
        """Whole layers as far as they fit into so many bytes; of a layer that does not, some tokens at a time."""
        start = layers.start
        while start < layers.stop:
            tokens = min(slots.tokens, most_tokens, most_bytes // self.layer_bytes[start])
            assert tokens > 0, "a token's KV of one layer is larger than the memory it passes through"
            stop, size = start + 1, self.layer_bytes[start] * slots.tokens
            while tokens == slots.tokens and stop < layers.stop:
                size += self.layer_bytes[stop] * slots.tokens
                if size > most_bytes:
                    break
                stop += 1
            for first in range(0, slots.tokens, tokens):
                yield Piece(range(start, stop), first, slots.part(first, min(tokens, slots.tokens - first)))
            start = stop

    def stretches(self, piece: Piece) -> Iterator[tuple[int, slice, slice]]:
        """Each plane of a piece: where its bytes lie in the piece's memory, and where in all that is copied of it."""
        here = 0
        for plane in self.planes(piece.layers):
            width = self.row_bytes[plane]
            size, there = piece.slots.tokens * width, piece.first * width
            yield plane, slice(here, here + size), slice(there, there + size)
            here += size
