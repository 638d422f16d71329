"""The exchange of rows between the ranks that hold a layer's experts: two methods, whatever carries the bytes.

It knows no model. A group's ranks call `dispatch` and `combine` in turn, all the same number of times, with rows or
without.

Shapes: T rows of this rank, H hidden width, K experts of a row, N rows received, S slots (experts that a rank holds).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from serving.kernels.cpu.grouped import PlacedRows

WIRE_DTYPES = (torch.int8, torch.bfloat16, torch.float32)
BACK_DTYPES = (torch.bfloat16, torch.float32)
SCALE_BYTES = 4


class RankLost(Exception):
    """A rank of the group takes part no longer: the step has no result, and the exchange is over.

    `rank` is the rank's number in its group, None where it cannot be told.
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        super().__init__(f"rank {'unknown' if rank is None else rank} of the group is lost: {reason}")
        self.rank = rank
        self.reason = reason


class ExchangeUnavailable(Exception):
    """This kind of exchange cannot be had here; another may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeShape:
    """What buffers are sized for. All ranks of a group have the same.

    Rows of int8 travel with a scale each: for experts whose first layer is INT8, which would make the same integers of
    them. Results travel unreduced, in `back`; with bfloat16 those of a float32 model are rounded.
    """

    ranks: int
    slots: int
    top_k: int
    hidden: int
    max_tokens: int  # of one rank in one dispatch
    wire: torch.dtype
    back: torch.dtype

    def __post_init__(self) -> None:
        if self.wire not in WIRE_DTYPES or self.back not in BACK_DTYPES:
            raise ValueError(f"rows of {self.wire} and results of {self.back} are not exchanged")
        if min(self.ranks, self.slots, self.top_k, self.hidden, self.max_tokens) < 1:
            raise ValueError("an exchange of nothing")
        if self.slots > torch.iinfo(torch.int16).max:
            raise ValueError(f"{self.slots} slots of one rank do not fit 16 bits")
        if self.most_received > torch.iinfo(torch.int32).max:
            raise ValueError(f"{self.most_received} rows that one rank may receive do not fit 32 bits")

    @property
    def row_bytes(self) -> int:
        """Of one row on the wire, without its slots."""
        return self.hidden * self.wire.itemsize + (SCALE_BYTES if self.wire is torch.int8 else 0)

    @property
    def most_results(self) -> int:
        """That one rank may have of one row."""
        return min(self.top_k, self.slots)

    @property
    def most_received(self) -> int:
        """Rows that one rank may receive, each as often as its experts take it."""
        return self.ranks * self.max_tokens * self.most_results


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a layer's input. With `scale` float32 [N] the `values` [N, H] are int8, and a row is their product."""

    values: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Portion:
    """All rows received for some slots, slot after slot. Valid until a portion is asked for again."""

    slots: range
    rows: Rows


@dataclass(frozen=True, slots=True)
class Received:
    """What `dispatch` brought: `counts` int32 [S] rows for each slot, N in all. Valid until their results are sent.

    Slot after slot, the rows come in portions, each gathered when it is asked for: it is in a cache when it is used.
    Who can read int8 rows where they lie, each elsewhere, asks for `in_place` and has none gathered. Results that are
    written into `results` [N, H], where there is such memory, need no copy.
    """

    portions: Iterable[Portion]
    counts: Tensor
    results: Tensor | None = None
    placed: PlacedRows | None = None

    @staticmethod
    def of(rows: Rows, counts: Tensor) -> Received:
        """Rows that lie in one place."""
        return Received((Portion(range(len(counts)), rows),), counts)

    def in_place(self) -> PlacedRows:
        """Where each of all rows, of int8, lies in memory of this host."""
        if self.placed is not None:
            return self.placed
        rows = self.whole()
        assert isinstance(self.portions, tuple) and rows.scale is not None, "a copy would not outlive this call"
        return PlacedRows.of(rows.values, rows.scale)

    def whole(self) -> Rows:
        """All rows [N, H] in one place: a copy where there are several portions."""
        if isinstance(self.portions, tuple):
            only: Portion = self.portions[0]
            return only.rows
        parts = [
            (part.rows.values.clone(), None if part.rows.scale is None else part.rows.scale.clone())
            for part in self.portions
        ]
        scales = [scale for _, scale in parts if scale is not None]
        return Rows(torch.cat([values for values, _ in parts]), torch.cat(scales) if scales else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTraffic:
    """What one rank has sent to others so far. A step's is the difference of two."""

    dispatches: int = 0
    rows: int = 0  # each once to every rank that holds an expert of it
    dispatch_bytes: int = 0  # values and scales of those rows
    routing_bytes: int = 0  # how many there are, and which slots take them
    combine_bytes: int = 0  # results

    def __add__(self, other: ExchangeTraffic) -> ExchangeTraffic:
        return ExchangeTraffic(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __sub__(self, before: ExchangeTraffic) -> ExchangeTraffic:
        return ExchangeTraffic(
            **{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)}
        )


class ExpertExchange(Protocol):
    """One rank's part in a group. What travels begins and ends, and other work may lie between the two.

    All ranks begin and finish in one order. Every method raises RankLost within the group's deadline, and from then on.
    """

    @property
    def shape(self) -> ExchangeShape: ...

    @property
    def rank(self) -> int: ...

    @property
    def traffic(self) -> ExchangeTraffic: ...

    @property
    def agreed(self) -> int:
        """The least number that a rank announced with the last dispatch: equal on all ranks between two steps."""

    def announce(self, number: int) -> None:
        """Tell all ranks this number with every dispatch from now on, at first 0."""

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        """Send each row to the ranks of its physical experts (rank * slots + slot, int32).

        Rows without a scale are quantized where int8 travels. At most two dispatches are under way before the results
        of the first of them are back. Raises ValueError for more than `max_tokens` rows.
        """

    def finish_dispatch(self) -> Received:
        """The rows of all ranks for the oldest dispatch that has begun and not ended: a slot's in a fixed order."""

    def begin_combine(self, results_NH: Tensor) -> None:
        """Send back, unreduced, what the experts made of the rows of the oldest dispatch without results."""

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        """The results of the own rows of that dispatch, added up times their float32 weights.

        In the order of K, float32 [T, H]: the bits of `serving.model.moe.weighted_sum`. The answer is valid until the
        next one.
        """

    def dispatch(self, rows: Rows, physical_TK: Tensor) -> Received:
        """Begin and finish at once."""

    def combine(self, results_NH: Tensor, weights_TK: Tensor) -> Tensor:
        """Begin and finish at once."""

    def close(self) -> None:
        """Take part no longer, and give back memory and descriptors; further calls do nothing."""


class RoundTrips:
    """What every exchange does where nothing else is to be done while rows and results travel."""

    def dispatch(self: ExpertExchange, rows: Rows, physical_TK: Tensor) -> Received:
        self.begin_dispatch(rows, physical_TK)
        return self.finish_dispatch()

    def combine(self: ExpertExchange, results_NH: Tensor, weights_TK: Tensor) -> Tensor:
        self.begin_combine(results_NH)
        return self.finish_combine(weights_TK)


def check_rows(shape: ExchangeShape, rows: Rows, physical_TK: Tensor) -> None:
    """Raises ValueError for rows that an exchange of this shape does not carry."""
    values, dtype, tokens = rows.values, rows.values.dtype, rows.values.shape[0]
    if tokens > shape.max_tokens:
        raise ValueError(f"{tokens} rows in one dispatch, of {shape.max_tokens} that there is room for")
    if values.shape != (tokens, shape.hidden) or physical_TK.shape != (tokens, shape.top_k):
        raise ValueError(f"rows {tuple(values.shape)} with experts {tuple(physical_TK.shape)} do not fit the exchange")
    carried = dtype is shape.wire or (shape.wire is torch.int8 and dtype in BACK_DTYPES)
    if not carried or (rows.scale is not None) != (dtype is torch.int8):
        raise ValueError(f"rows of {dtype} do not travel as {shape.wire}")
