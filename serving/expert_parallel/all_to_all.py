"""The exchange of ranks on any hosts: `torch.distributed.all_to_all_single` over buffers that are made once.

Rows travel in parts of one size, so that no rank has to be told first how many come: `most_tokens` rows to each rank,
whatever there are. What comes back is as long as both sides know it to be. Every wait is polled, with a deadline.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from serving.expert_parallel.bounded import BoundedStore, StoreUnavailable
from serving.expert_parallel.exchange import (
    SCALE_BYTES,
    ExchangeShape,
    ExchangeTraffic,
    RankLost,
    Received,
    RoundTrips,
    Rows,
    check_rows,
)
from serving.expert_parallel.local import on_the_wire
from serving.expert_parallel.meeting import MEETING_SECONDS, exchanged
from serving.expert_parallel.processes import ProcessWatch
from serving.expert_parallel.waits import BoundedWaits
from serving.model.moe import weighted_sum

ALIGNED = 64
KEPT_SIZES = 64  # of dispatches, whose views are kept
LOOPBACK = "127.0.0.1"
GROUP_END = "group-end"  # the thread that closes a group's connections


class AllToAllGroup(Protocol):
    """What is needed of a process group of `torch.distributed`."""

    def rank(self) -> int: ...

    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]) -> Work:
        """Begin to send parts of `input`, of equal size without splits, and to receive those of `output`."""


def connected(store: Store, rank: int, ranks: int, seconds: float, *, on_one_host: bool = False) -> AllToAllGroup:
    """A group over gloo, whose operations fail after this time. Raises RankLost where it does not come about in it.

    Ranks that are all `on_one_host` listen there alone. Raises StoreUnavailable for a store that does not answer.
    """

    gloo: Any = ProcessGroupGloo  # torch's stub does not have its options

    def made(asked: Store) -> Any:
        options = gloo._Options()
        options._timeout = timedelta(seconds=seconds)
        options._devices = [gloo.create_device(hostname=LOOPBACK) if on_one_host else gloo.create_default_device()]
        return gloo(asked, rank, ranks, options)

    try:
        group = BoundedStore(store).ask(made, seconds)
    except RuntimeError as error:
        raise RankLost(None, f"no connection within the deadline: {error}") from error
    return cast(AllToAllGroup, group)


def let_go(held: list[object]) -> None:
    """Close the groups in a list: those whose operation waits for a rank that has stopped end with its time alone.

    A thread sees to that; it must be the last to hold them.
    """
    Thread(target=held.clear, name=GROUP_END, daemon=True).start()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Parts:
    """Buffers of one part for each rank, as long as `tokens` rows need: views of `flat`, part by part."""

    def __init__(self, flat: Tensor, shape: ExchangeShape, tokens: int) -> None:
        slots = ALIGNED
        scales = slots + _aligned(tokens * shape.top_k * 2)
        values = scales + _aligned(tokens * SCALE_BYTES)
        end = values + _aligned(tokens * shape.hidden * shape.wire.itemsize)
        self.bytes = end
        self.flat = flat[: shape.ranks * end]
        parts = self.flat.view(shape.ranks, end)
        self.counts = parts[:, :4].view(torch.int32)[:, 0]  # [ranks]
        self.announced = parts[:, 4:8].view(torch.int32)[:, 0]  # [ranks]
        slots_bytes, row_bytes = tokens * shape.top_k * 2, tokens * shape.hidden * shape.wire.itemsize
        self.slots = parts[:, slots : slots + slots_bytes].view(torch.int16).view(-1, tokens, shape.top_k)
        self.scales = parts[:, scales : scales + tokens * SCALE_BYTES].view(torch.float32)  # [ranks, tokens]
        self.values = parts[:, values : values + row_bytes].view(shape.wire).view(-1, tokens, shape.hidden)


class ExchangeBuffers:
    """What every second dispatch travels in, and its results."""

    def __init__(self, shape: ExchangeShape) -> None:
        size = Parts(torch.empty(1 << 62, dtype=torch.uint8, device="meta"), shape, shape.max_tokens).bytes
        self._outgoing = torch.zeros(shape.ranks * size, dtype=torch.uint8)
        self._incoming = torch.zeros(shape.ranks * size, dtype=torch.uint8)
        self._parts: dict[int, tuple[Parts, Parts]] = {}
        self.results_out = torch.empty(shape.most_received, shape.hidden, dtype=shape.back)
        self.results_in = torch.empty(shape.max_tokens * shape.top_k, shape.hidden, dtype=shape.back)

    def parts(self, shape: ExchangeShape, tokens: int) -> tuple[Parts, Parts]:
        """Outgoing and incoming, for so many rows at most."""
        if tokens not in self._parts:
            if len(self._parts) == KEPT_SIZES:
                self._parts.clear()
            self._parts[tokens] = Parts(self._outgoing, shape, tokens), Parts(self._incoming, shape, tokens)
        return self._parts[tokens]


@dataclass(slots=True)
class _Trip:
    """A dispatch until it is combined."""

    work: Work  # that is under way
    buffers: ExchangeBuffers
    incoming: Parts
    results_from: list[int]  # of each rank: results that it owes
    own_order: Tensor  # [T * K], for each result that comes back its place t * K + k
    received_order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    # [N], for each row received the place of its result among those that go back
    results_to: list[int] = field(default_factory=list)


class AllToAllExchange(RoundTrips):
    """One rank's part (exchange.ExpertExchange) over a process group of `torch.distributed`.

    Before each step its leader may lower `most_tokens`, on all ranks alike: nobody has more rows in it.
    """

    def __init__(
        self, shape: ExchangeShape, group: AllToAllGroup, store: Store, watch: ProcessWatch, deadline: float
    ) -> None:
        """`store` is where ranks that have waited for `deadline` seconds find out for whom."""
        self.shape, self.rank = shape, group.rank()
        self.most_tokens = shape.max_tokens
        self._group: AllToAllGroup | None = group
        self._waits = BoundedWaits(store, self.rank, shape.ranks, watch, deadline)
        self._buffers = [ExchangeBuffers(shape) for _ in range(2)]
        self._own = torch.empty(shape.max_tokens * shape.top_k, shape.hidden, dtype=shape.back)
        self._dispatched = 0
        self._arriving: deque[_Trip] = deque()
        self._computing: deque[_Trip] = deque()
        self._returning: deque[_Trip] = deque()
        self._announced = self.agreed = 0
        self.traffic = ExchangeTraffic()

    @classmethod
    def join(
        cls, shape: ExchangeShape, rank: int, store: Store, *, deadline: float, meeting: float = MEETING_SECONDS
    ) -> Self:
        """Meet the other ranks in `store` within `meeting` seconds, and connect to them by gloo.

        Raises RankLost for one that does not come, StoreUnavailable for a store that does not answer.
        """
        own = f"{host_key()} {os.getpid()}"
        words = exchanged(store, "process", rank, shape.ranks, own.encode(), meeting)
        processes = {other: word.decode().rsplit(" ", 1) for other, word in enumerate(words) if other != rank}
        watch = ProcessWatch({other: int(pid) for other, (host, pid) in processes.items() if host == host_key()})
        try:
            # gloo's own limit only ends what this exchange has given up long before.
            near = all(host == host_key() for host, _ in processes.values())
            group = connected(store, rank, shape.ranks, 2 * deadline, on_one_host=near)
        except (RankLost, StoreUnavailable):
            watch.close()
            raise
        return cls(shape, group, store, watch, deadline)

    def announce(self, number: int) -> None:
        self._announced = number

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        check_rows(self.shape, rows, physical_TK)
        if len(rows.values) > self.most_tokens:
            raise ValueError(f"{len(rows.values)} rows in a step of at most {self.most_tokens}")
        buffers = self._buffers[self._dispatched % 2]
        self._dispatched += 1
        outgoing, incoming = buffers.parts(self.shape, self.most_tokens)
        outgoing.announced.fill_(self._announced)
        results_from, own_order = self._fill(outgoing, on_the_wire(rows, self.shape.wire), physical_TK)
        work = self._begin(lambda group: group.alltoall_base(incoming.flat, outgoing.flat, [], []))
        self._count_dispatch(outgoing)
        self._arriving.append(_Trip(work, buffers, incoming, results_from, own_order))

    def finish_dispatch(self) -> Received:
        self._waits.check()
        trip = self._arriving.popleft()
        self._waits.finish(trip.work)
        self.agreed = int(trip.incoming.announced.min())
        received, trip.received_order, trip.results_to = self._sorted(trip.incoming)
        self._computing.append(trip)
        return received

    def begin_combine(self, results_NH: Tensor) -> None:
        self._waits.check()
        trip, shape = self._computing.popleft(), self.shape
        results_out = trip.buffers.results_out[: len(results_NH)]
        results_out.index_copy_(0, trip.received_order, results_NH.to(shape.back))
        results_in = trip.buffers.results_in[: len(trip.own_order)]
        trip.work = self._begin(
            lambda group: group.alltoall_base(results_in, results_out, trip.results_from, trip.results_to)
        )
        away = sum(trip.results_to) - trip.results_to[self.rank]
        self.traffic += ExchangeTraffic(combine_bytes=away * shape.hidden * shape.back.itemsize)
        self._returning.append(trip)

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        self._waits.check()
        trip, shape = self._returning.popleft(), self.shape
        self._waits.finish(trip.work)
        own = self._own[: len(trip.own_order)]
        own.index_copy_(0, trip.own_order, trip.buffers.results_in[: len(trip.own_order)])
        return weighted_sum(own.view(-1, shape.top_k, shape.hidden), weights_TK)

    def _fill(self, outgoing: Parts, rows: Rows, physical_TK: Tensor) -> tuple[list[int], Tensor]:
        """Puts rows into the parts of their ranks; how many results each owes, and in which order they come."""
        ranks_TK, slots_TK = physical_TK // self.shape.slots, (physical_TK % self.shape.slots).to(torch.int16)
        owed, orders = [], []
        for rank in range(self.shape.ranks):
            taken_TK = ranks_TK == rank
            chosen = taken_TK.any(1).nonzero()[:, 0]
            count = len(chosen)
            outgoing.counts[rank] = count
            outgoing.slots[rank, :count] = torch.where(taken_TK, slots_TK, -1)[chosen]
            outgoing.values[rank, :count] = rows.values.index_select(0, chosen)
            if rows.scale is not None:
                outgoing.scales[rank, :count] = rows.scale[chosen]
            orders.append(taken_TK.flatten().nonzero()[:, 0])
            owed.append(len(orders[-1]))
        return owed, torch.cat(orders)

    def _sorted(self, incoming: Parts) -> tuple[Received, Tensor, list[int]]:
        """Rows slot by slot, each slot's by rank and as they came; the places of their results; how many for each."""
        places, slots, owed = [], [], []
        counts = incoming.counts.tolist()
        for rank, count in enumerate(counts):
            taken = incoming.slots[rank, :count]
            places_P, k_P = (taken >= 0).nonzero(as_tuple=True)
            slots.append(taken[places_P, k_P])
            places.append(places_P + sum(counts[:rank]))
            owed.append(len(places_P))
        slots_N = torch.cat(slots).long()
        order = slots_N.argsort(stable=True)
        at = torch.cat(places)[order]

        def chosen(parts: Tensor) -> Tensor:
            return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).index_select(0, at)

        rows = Rows(chosen(incoming.values), chosen(incoming.scales) if self.shape.wire is torch.int8 else None)
        return Received.of(rows, slots_N.bincount(minlength=self.shape.slots).int()), order, owed

    def _count_dispatch(self, outgoing: Parts) -> None:
        """What travelled, the empty ends of parts included: as rows' bytes, but for the slots."""
        others = self.shape.ranks - 1
        routing = ALIGNED + _aligned(self.most_tokens * self.shape.top_k * 2)
        rows = int(outgoing.counts.sum()) - int(outgoing.counts[self.rank])
        self.traffic += ExchangeTraffic(
            dispatches=1,
            rows=rows,
            dispatch_bytes=others * (outgoing.bytes - routing),
            routing_bytes=others * routing,
        )

    def _begin(self, start: Callable[[AllToAllGroup], Work]) -> Work:
        """One operation. Raises RankLost; then the group is of no use any more."""
        self._waits.check()
        group = self._group
        assert group is not None
        return self._waits.begin(lambda: start(group))

    def close(self) -> None:
        if self._group is not None:
            held: list[object] = [self._group]
            self._group = None
            let_go(held)
        self._waits.close()


def host_key() -> str:
    """Equal for processes that know each other by number: of one start of one kernel, in one namespace of processes."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
