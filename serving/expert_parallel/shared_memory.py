"""The exchange of ranks on one host, through memory that they share: no copy by the kernel, no call of it but to sleep.

Each rank has a segment (serving.shared_memory) sized for the largest step, which it alone writes. What orders memory
between processes are C++ atomics in serving/kernels/cpu/exchange.cpp; without a compiler there is no such exchange.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from serving.expert_parallel.bounded import StoreUnavailable
from serving.expert_parallel.exchange import (
    ExchangeShape,
    ExchangeTraffic,
    ExchangeUnavailable,
    Portion,
    RankLost,
    Received,
    RoundTrips,
    Rows,
    check_rows,
)
from serving.expert_parallel.meeting import MEETING_SECONDS, exchanged
from serving.expert_parallel.processes import ProcessWatch
from serving.kernels import cpu
from serving.kernels.cpu.exchange import REASONS, ExchangeFunctions, Shape
from serving.kernels.cpu.exchange import Traffic as CountedTraffic
from serving.kernels.cpu.grouped import PlacedRows
from serving.shared_memory import FIRST_BYTE, Bytes, Segment, SegmentUnavailable, available, mapped, process_of

DEADLINE_SECONDS = 10.0  # that a rank may keep the others waiting
SPIN_SECONDS = 50e-6  # awake for what is about to come, where every rank has a core
KEPT_VIEWS = 256  # of rows received, by their number: each takes some µs to make


class SharedMemoryExchange(RoundTrips):
    """One rank's part (exchange.ExpertExchange). Buffers are made once; a call allocates none."""

    def __init__(
        self, shape: ExchangeShape, rank: int, segments: list[Bytes], watch: ProcessWatch, deadline: float, spin: float
    ) -> None:
        """`segments` of every rank without their first page; the own one is written, the others are read."""
        self.shape, self.rank = shape, rank
        self._functions = functions()
        self._segments, self._watch = segments, watch
        addresses = (ctypes.c_void_p * shape.ranks)(*(memory.ctypes.data for memory in segments))
        numbers = ctypes.c_int32 * shape.ranks
        pidfds = numbers(*(watch.descriptors.get(other, -1) for other in range(shape.ranks)))
        pids = numbers(*(watch.pids.get(other, -1) for other in range(shape.ranks)))
        self._exchange: int | None = self._functions.create(
            c_shape(shape, rank), addresses, pidfds, pids, int(deadline * 1e9), int(spin * 1e9)
        )
        self._counted = self._functions.traffic(self._exchange).contents
        self._loss = self._functions.loss(self._exchange).contents
        quantized = shape.wire is torch.int8
        portion = self._functions.portion(c_shape(shape, rank))
        self._values = torch.empty(portion, shape.hidden, dtype=shape.wire)  # of both dispatches under way, in turn
        self._scales = torch.empty(portion) if quantized else None
        self._rows = lru_cache(KEPT_VIEWS)(partial(_first_rows, self._values, self._scales))
        self._gathered = self._values.data_ptr(), None if self._scales is None else self._scales.data_ptr()
        self._counts = [torch.zeros(shape.slots, dtype=torch.int32) for _ in range(2)]
        self._results = [self._results_of(region) for region in range(2)]
        self._placed = [self._places_of(region) for region in range(2)] if quantized else None
        self._told = ctypes.c_int32()  # a second answer of a function
        self._region = 0  # of the dispatch that came last
        self._sums = torch.empty(shape.max_tokens, shape.hidden)
        self._tokens, self._received = [0, 0], [0, 0]
        self._dispatched = self._arrived = self._returned = self._combined = 0

    @classmethod
    def join(
        cls,
        shape: ExchangeShape,
        rank: int,
        store: Store,
        *,
        deadline: float = DEADLINE_SECONDS,
        meeting: float = MEETING_SECONDS,
        spin: float | None = None,
        processes: Mapping[int, int] = MappingProxyType({}),
    ) -> Self:
        """Meet the other ranks in `store` within `meeting` seconds; `deadline` is that of every wait after it.

        `spin`: see SPIN_SECONDS. `processes` of other ranks, where they are known, are not waited for once they end.

        Raises ExchangeUnavailable where memory cannot be shared, RankLost for one that does not come,
        StoreUnavailable for a store that does not answer.
        """
        if not available():
            raise ExchangeUnavailable("this system has no anonymous files to share memory by")
        segment = Segment(functions().bytes(c_shape(shape, rank)), "millrace-experts")
        watch = ProcessWatch(processes)
        try:
            offers = exchanged(store, "segment", rank, shape.ranks, segment.details, meeting, watch)
            watch.close()
            # The processes first: if a number has been used again, the memory found by it has another secret.
            watch = ProcessWatch({other: process_of(offer) for other, offer in enumerate(offers) if other != rank})
            segments = [
                (segment.memory if other == rank else mapped(offer, writable=False))[FIRST_BYTE:]
                for other, offer in enumerate(offers)
            ]
            exchanged(store, "mapped", rank, shape.ranks, b"", meeting, watch)
        except SegmentUnavailable as error:
            watch.close()
            raise ExchangeUnavailable(str(error)) from error
        except (RankLost, StoreUnavailable):
            watch.close()
            raise
        finally:
            segment.close()  # the memory stays: whoever was to map it has done so
        if spin is None:
            spin = SPIN_SECONDS if shape.ranks <= cpu.default_threads() else 0.0
        return cls(shape, rank, segments, watch, deadline, spin)

    @property
    def traffic(self) -> ExchangeTraffic:
        counted = self._counted
        return ExchangeTraffic(
            dispatches=counted.dispatches,
            rows=counted.rows,
            dispatch_bytes=counted.dispatch_bytes,
            routing_bytes=counted.routing_bytes,
            combine_bytes=counted.combine_bytes,
        )

    @property
    def address(self) -> int:
        """The compiled exchange (exchange.h), for kernels that send and receive by themselves; then `check`.

        Raises RankLost as that.
        """
        self.check()
        assert self._exchange is not None
        return self._exchange

    @property
    def agreed(self) -> int:
        return 0 if self._exchange is None else int(self._functions.agreed(self._exchange))

    def announce(self, number: int) -> None:
        if self._exchange is not None:
            self._functions.announce(self._exchange, number)

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        check_rows(self.shape, rows, physical_TK)
        self.check()
        assert self._dispatched - self._combined < 2, "two dispatches are under way"
        self._dispatched += 1
        self._tokens[self._dispatched % 2] = len(rows.values)
        values, scale, physical = rows.values.contiguous(), rows.scale, physical_TK.contiguous()
        assert physical.dtype is torch.int32, physical.dtype
        sent = self._functions.begin_dispatch(
            self._exchange,
            values.data_ptr(),
            None if scale is None else scale.data_ptr(),
            cpu.Kind.of(values.dtype),
            len(values),
            physical.data_ptr(),
        )
        if sent < 0:
            raise self._lost()

    def finish_dispatch(self) -> Received:
        self.check()
        assert self._arrived < self._dispatched, "no dispatch has begun"
        self._arrived += 1
        counts = self._counts[self._arrived % 2]
        received = self._functions.finish_dispatch(self._exchange, counts.data_ptr(), self._told)
        if received < 0:
            raise self._lost()
        self._received[self._arrived % 2] = received
        region = self._region = self._told.value
        placed = None if self._placed is None else self._placed[region](received)
        return Received(_Portions(self, region), counts, self._results[region][:received], placed)

    def addresses(self, received: int) -> Tensor:
        """Where each of so many rows lies that came with the last dispatch, int64 [N], slot by slot."""
        assert self._exchange is not None
        return _numbers(self._functions.rows(self._exchange, self._region), ctypes.c_int64, received)

    def portions(self, region: int) -> Iterator[Portion]:
        """The rows received that lie in this region, gathered as they are asked for."""
        first = 0
        while first < self.shape.slots:
            self.check()
            count = self._functions.gather(self._exchange, region, first, *self._gathered, self._told)
            end = self._told.value
            yield Portion(range(first, end), self._rows(count))
            first = end

    def begin_combine(self, results_NH: Tensor) -> None:
        self.check()
        assert self._returned < self._arrived, "nothing waits to be combined"
        self._returned += 1
        results, parity = results_NH.contiguous(), self._returned % 2
        assert results.shape == (self._received[parity], self.shape.hidden), results.shape
        address = results.data_ptr() if len(results) else self._results[0].data_ptr()
        if self._functions.begin_combine(self._exchange, address, cpu.Kind.of(results.dtype)) < 0:
            raise self._lost()

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        self.check()
        assert self._combined < self._returned, "no combine has begun"
        self._combined += 1
        weights, tokens = weights_TK.contiguous(), self._tokens[self._combined % 2]
        assert weights.shape == (tokens, self.shape.top_k) and weights.dtype is torch.float32
        if self._functions.finish_combine(self._exchange, weights.data_ptr(), self._sums.data_ptr()) < 0:
            raise self._lost()
        return self._sums[:tokens]

    def _results_of(self, region: int) -> Tensor:
        """Where results of rows in this region are read by the others."""
        own = self._segments[self.rank]
        first = self._functions.results(self._exchange, region) - own.ctypes.data
        end = first + self.shape.most_received * self.shape.hidden * self.shape.back.itemsize
        return torch.from_numpy(own[first:end]).view(self.shape.back).view(-1, self.shape.hidden)

    def _places_of(self, region: int) -> Callable[[int], PlacedRows]:
        """For so many rows received in this region, where they lie."""
        most = self.shape.most_received
        addresses = _numbers(self._functions.rows(self._exchange, region), ctypes.c_int64, most)
        scales = _numbers(self._functions.scales(self._exchange, region), ctypes.c_float, most)
        return lru_cache(KEPT_VIEWS)(lambda count: PlacedRows(addresses[:count], scales[:count]))

    def check(self) -> None:
        """Raises RankLost once there was one, and after the end."""
        if self._exchange is None or self._loss.reason:
            raise self._lost()

    def _lost(self) -> RankLost:
        if self._exchange is None:
            return RankLost(self.rank, "its exchange is closed")
        return RankLost(self._loss.rank, REASONS[self._loss.reason])

    def close(self) -> None:
        if self._exchange is None:
            return
        self._functions.leave(self._exchange)
        self._counted = CountedTraffic.from_buffer_copy(self._counted)
        self._functions.destroy(self._exchange)
        self._exchange = None
        self._watch.close()
        self._segments, self._results = [], []


def _numbers(address: int, kind: type[ctypes.c_int64 | ctypes.c_float], count: int) -> Tensor:
    """So many of them that are of the compiled exchange, and are there as long as it is."""
    return torch.from_numpy(np.ctypeslib.as_array((kind * count).from_address(address)))


def _first_rows(values: Tensor, scales: Tensor | None, count: int) -> Rows:
    return Rows(values[:count], None if scales is None else scales[:count])


@dataclass(frozen=True, slots=True)
class _Portions:
    """The rows of one dispatch, gathered anew whenever they are gone through."""

    exchange: SharedMemoryExchange
    region: int

    def __iter__(self) -> Iterator[Portion]:
        return self.exchange.portions(self.region)


def c_shape(shape: ExchangeShape, rank: int) -> ctypes.Structure:
    """The shape as the compiled library takes it."""
    sizes = (shape.ranks, rank, shape.slots, shape.top_k, shape.hidden, shape.max_tokens)
    return Shape(*sizes, cpu.Kind.of(shape.wire), cpu.Kind.of(shape.back))


def functions() -> ExchangeFunctions:
    """Raises ExchangeUnavailable where the library cannot be had."""
    library = cpu.shared_library()
    if library is None or not hasattr(os, "pidfd_open"):
        raise ExchangeUnavailable("the exchange through shared memory needs Linux and a C++ compiler")
    return ExchangeFunctions(library)
