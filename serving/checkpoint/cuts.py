"""Which part of a parameter a rank holds, as ranges of its rows and columns. No torch, and nothing of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Some rows of a whole parameter [out, in] or [out], in their order, and some of its columns; None is all."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None


def overlaps(ranges: Sequence[range], first: int, count: int) -> Iterator[range]:
    """What the ranges have of `count` rows from `first` on, counted from there."""
    for held in ranges:
        start, stop = max(held.start, first), min(held.stop, first + count)
        if start < stop:
            yield range(start - first, stop - first)
