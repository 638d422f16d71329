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
CACHED_BYTES = 32 << 20  # of all ranks' results in a round that caches may hold: the L3 of a Zen 4
KEPT_VIEWS = 256  # of rows received and of sums, by their number: each takes some µs to make


class SharedMemoryExchange(RoundTrips):
    """One rank's part (exchange.ExpertExchange). Buffers are made once; a call allocates none.

    Rows go through the caches between two calls, so that each call of torch's costs ten times what it does alone:
    views and addresses are kept.
    """

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
            c_shape(shape, rank), addresses, pidfds, pids, int(deadline * 1e9), int(spin * 1e9), CACHED_BYTES
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
        self._counts_at = [counts.data_ptr() for counts in self._counts]
        self._results = [self._results_of(region) for region in range(2)]
        self._placed = [self._places_of(region) for region in range(2)] if quantized else None
        self._told = ctypes.c_int32()  # a second answer of a function
        self._told_at = ctypes.addressof(self._told)
        self._region = 0  # of the dispatch that came last
        self._sums = torch.empty(shape.max_tokens, shape.hidden)
        self._sums_at = self._sums.data_ptr()
        self._first_sums = lru_cache(KEPT_VIEWS)(partial(self._sums.narrow, 0, 0))
        self._kept: dict[tuple[int, int, int], Received] = {}
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
    def uncached_sums(self) -> int:
        """Rows whose sums were stored past the caches so far."""
        return int(self._counted.uncached_sums)

    @property
    def address(self) -> int:
        """The compiled exchange (exchange.h), for kernels that send and receive by themselves; then `check`.

        Raises RankLost as that.
        """
        return self._open()

    @property
    def agreed(self) -> int:
        return 0 if self._exchange is None else int(self._functions.agreed(self._exchange))

    def announce(self, number: int) -> None:
        if self._exchange is not None:
            self._functions.announce(self._exchange, number)

    def begin_dispatch(self, rows: Rows, physical_TK: Tensor) -> None:
        check_rows(self.shape, rows, physical_TK)
        exchange = self._open()
        assert self._dispatched - self._combined < 2, "two dispatches are under way"
        self._dispatched += 1
        values, scale, physical = _contiguous(rows.values), rows.scale, _contiguous(physical_TK)
        tokens = self._tokens[self._dispatched % 2] = values.shape[0]
        assert physical.dtype is torch.int32, physical.dtype
        sent = self._functions.begin_dispatch(
            exchange,
            values.data_ptr(),
            None if scale is None else scale.data_ptr(),
            cpu.Kind.of(values.dtype),
            tokens,
            physical.data_ptr(),
        )
        if sent < 0:
            raise self._lost()

    def finish_dispatch(self) -> Received:
        exchange = self._open()
        assert self._arrived < self._dispatched, "no dispatch has begun"
        self._arrived += 1
        parity = self._arrived % 2
        received = self._functions.finish_dispatch(exchange, self._counts_at[parity], self._told_at)
        if received < 0:
            raise self._lost()
        self._received[parity] = received
        self._region = self._told.value
        return self._received_of(parity, self._region, received)

    def _received_of(self, parity: int, region: int, received: int) -> Received:
        """So many rows of a dispatch of an even or odd number, in this region: as many another time are told alike."""
        kept = self._kept.get((parity, region, received))
        if kept is None:
            if len(self._kept) == KEPT_VIEWS:
                self._kept.clear()
            placed = None if self._placed is None else self._placed[region](received)
            kept = Received(_Portions(self, region), self._counts[parity], self._results[region][:received], placed)
            self._kept[parity, region, received] = kept
        return kept

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
        exchange = self._open()
        assert self._returned < self._arrived, "nothing waits to be combined"
        self._returned += 1
        results, received = _contiguous(results_NH), self._received[self._returned % 2]
        assert results.shape == (received, self.shape.hidden), results.shape
        address = results.data_ptr() if received else self._results[0].data_ptr()
        if self._functions.begin_combine(exchange, address, cpu.Kind.of(results.dtype)) < 0:
            raise self._lost()

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        exchange = self._open()
        assert self._combined < self._returned, "no combine has begun"
        self._combined += 1
        weights, tokens = _contiguous(weights_TK), self._tokens[self._combined % 2]
        assert weights.shape == (tokens, self.shape.top_k) and weights.dtype is torch.float32
        if self._functions.finish_combine(exchange, weights.data_ptr(), self._sums_at) < 0:
            raise self._lost()
        return self._first_sums(tokens)

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
        self._open()

    def _open(self) -> int:
        """The compiled exchange, unless a rank is lost."""
        exchange = self._exchange
        if exchange is None or self._loss.reason:
            raise self._lost()
        return exchange

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
        self._kept.clear()


def _numbers(address: int, kind: type[ctypes.c_int64 | ctypes.c_float], count: int) -> Tensor:
    """So many of them that are of the compiled exchange, and are there as long as it is."""
    return torch.from_numpy(np.ctypeslib.as_array((kind * count).from_address(address)))


def _contiguous(tensor: Tensor) -> Tensor:
    """Asking first is less work than a call of torch's that need do nothing."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


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
