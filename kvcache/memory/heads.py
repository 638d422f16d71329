"""How the KV heads that the ranks of one worker hold (`serving.kvspec.heads_of`) become those of another's ranks.

Pure numbers: it moves no bytes and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from serving.kvspec import heads_of


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Heads one rank sends to another: `heads` as the sender counts its own, `place` as the receiver counts its own."""

    rank: int  # the sender
    heads: range
    place: range
    of: int  # heads the receiver holds

    @property
    def whole(self) -> bool:
        """True if no other rank sends heads to this receiver."""
        return len(self.place) == self.of


def slice_map(kv_heads: int, from_size: int, to_size: int) -> tuple[tuple[HeadSlice, ...], ...]:
    """For each of `to_size` receiving ranks the head_slices that make up its heads, in their order, each head once.

    Planes without an axis of heads are cut like one head, which every rank holds: each receiver has one slice then.
    Of several senders that hold a head, receivers take turns, so that none of them sends everything.
    """
    return tuple(_slices(kv_heads, from_size, rank, to_size) for rank in range(to_size))


def _slices(kv_heads: int, from_size: int, rank: int, to_size: int) -> tuple[HeadSlice, ...]:
    wanted = heads_of(kv_heads, rank, to_size)

    def sender_of(head: int) -> int:
        holders = [sender for sender in range(from_size) if head in heads_of(kv_heads, sender, from_size)]
        return holders[rank % len(holders)]

    def head_slice(sender: int, heads: list[int]) -> HeadSlice:
        here, there = heads_of(kv_heads, sender, from_size).start, wanted.start
        first, end = heads[0], heads[-1] + 1
        return HeadSlice(sender, range(first - here, end - here), range(first - there, end - there), len(wanted))

    return tuple(head_slice(sender, list(heads)) for sender, heads in groupby(wanted, sender_of))
