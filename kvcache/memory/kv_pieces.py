"""Which rank of one layout sends which layers and heads of a sequence's KV to which rank of another.

Pure numbers: it moves no bytes and imports no torch. The layouts may differ in every form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcache.memory.heads import HeadSlice, slice_map
from serving.model.spec import ModelSpec
from serving.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class KVPiece:
    """KV that rank `sender` has and rank `receiver` needs: consecutive layers, some heads of each."""

    sender: int
    receiver: int
    layers: range  # as the sender counts its own
    first_layer: int  # the first of them, as the receiver counts its own
    heads: HeadSlice


def kv_pieces(spec: ModelSpec, source: ParallelLayout, target: ParallelLayout) -> Iterator[KVPiece]:
    """All that has to be sent, receiver by receiver: together every layer and head that each of them keeps, once.

    MLA's latents, which all ranks of a stage keep whole, come to each receiver from one sender.
    """
    kv_heads = 1 if spec.mla is not None else spec.kv_heads
    slices = slice_map(kv_heads, source.head_ranks, target.head_ranks)
    for receiver in range(target.ranks):
        wanted = target.layers(spec, receiver)
        for head_slice in slices[target.head_rank(receiver)]:
            for stage in range(source.pipeline):
                sender = source.with_heads_of(stage, head_slice.rank)
                held = source.layers(spec, sender)
                first, end = max(held.start, wanted.start), min(held.stop, wanted.stop)
                if first < end:
                    layers = range(first - held.start, end - held.start)
                    yield KVPiece(sender, receiver, layers, first - wanted.start, head_slice)
