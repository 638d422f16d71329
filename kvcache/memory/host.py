"""The bytes of host offload: KV planes in host memory, and two buffers on the device that it is read through.

While attention computes over one segment, the next is copied into the other buffer: by a thread where the device is the
CPU, by a stream of its own on CUDA. It knows extents and blocks by number; kvcache.blocks.offload decides who
holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kvcache.blocks.offload import OffloadPlan
from kvcache.memory.device import DeviceKV
from serving.batch.device_copy import on_device
from serving.batch.ragged import KVSegment, OffloadedKV
from serving.engine.offload import OffloadMove, OffloadState
from serving.kvspec import AUTO, LayerKV
from serving.streams import IMMEDIATE, Streams, streams_of

BUFFERS = 2


class HostKV:
    """Host planes for `plan.extents` extents of every layer of `device_kv` (serving.engine.runner.OffloadBackend).

    `windows` says for each layer how many last tokens a token sees; None is all.
    """

    def __init__(self, plan: OffloadPlan, device_kv: DeviceKV, windows: Sequence[int | None]):
        self.plan = plan
        self.device_kv = device_kv
        self.windows = tuple(windows)
        self.device = device_kv.planes[0][0].device
        self.memory = DeviceKV(device_kv.specs, plan.extents, plan.extent_tokens)  # on the CPU, whatever the device
        self.planes = self.memory.planes
        self.blocks = self._as_blocks()
        self.streams = streams_of(self.device)
        self.copier: Copier = ThreadCopier() if self.streams is IMMEDIATE else StreamCopier(self.streams)
        self._moved = self.streams.event()
        for plane in (plane for layer in self.planes for plane in layer):
            self.streams.pin(plane)
        self._buffers = {spec: [self._buffer(spec) for _ in range(BUFFERS)] for spec in set(device_kv.specs)}
        self.bytes_out = 0  # device to host
        self.bytes_in = 0

    def _as_blocks(self) -> DeviceKV:
        """The same memory in blocks of the device's size: an extent is so many of them, one after another."""
        size, count = self.device_kv.block_size, self.plan.extents * self.plan.extent_blocks
        planes = [tuple(plane.view(count, size, *plane.shape[2:]) for plane in layer) for layer in self.planes]
        return DeviceKV(self.device_kv.specs, count, size, planes=planes)

    def _buffer(self, spec: LayerKV) -> DeviceKV:
        return DeviceKV([spec], self.plan.segment_extents, self.plan.extent_tokens, self.device)

    def move(self, moves: Sequence[OffloadMove]) -> None:
        """Copy these blocks to their extents, for all layers. On CUDA in the order of the current stream."""
        for move in moves:
            blocks = on_device(move.blocks, torch.int64, self.device)
            for layer, planes in enumerate(self.device_kv.planes):
                for plane, host in zip(planes, self.planes[layer], strict=True):
                    extent = host[move.extent]
                    extent.view(len(blocks), -1, *extent.shape[1:]).copy_(plane[blocks], non_blocking=True)
                    self.bytes_out += extent.nbytes
        if moves:
            self._moved.record(self.streams.current())

    def wait_moves(self) -> None:
        """What has been moved is in host memory when it returns. Call it before reading or writing there on the CPU."""
        self._moved.synchronize()

    @contextmanager
    def stream(self, offload: OffloadState, computed: int, kv_dtype: str = AUTO) -> Iterator[OffloadedKV]:
        """The segments a step from position `computed` on reads, layer by layer. One stream at a time.

        `kv_dtype` is what the sequence's blocks and extents hold.
        """
        tokens = offload.moved * self.plan.extent_tokens
        loads = [
            SegmentLoad(layer, offload.extents[first:last], first * self.plan.extent_tokens)
            for layer, window in enumerate(self.windows)
            for first, last in segments(offload.moved, self.plan.segment_extents, self._first_extent(window, computed))
        ]
        stream = SegmentStream(self, tokens, loads, kv_dtype)
        self.copier.begin()
        try:
            yield stream
        finally:
            self.copier.end()

    def _first_extent(self, window: int | None, computed: int) -> int:
        """The extent of the oldest token that a token at position `computed` sees."""
        return 0 if window is None else max(0, computed - window + 1) // self.plan.extent_tokens

    def load(self, load: SegmentLoad, number: int) -> None:
        """Copy a segment into its buffer: what the copier does in its own time."""
        for host, buffer in zip(self.planes[load.layer], self.buffer(load, number).planes[0], strict=True):
            for at, extent in enumerate(load.extents):
                buffer[at].copy_(host[extent], non_blocking=True)
                self.bytes_in += buffer[at].nbytes

    def buffer(self, load: SegmentLoad, number: int) -> DeviceKV:
        """One layer's worth of blocks, an extent each."""
        return self._buffers[self.device_kv.specs[load.layer]][number % BUFFERS]


@dataclass(frozen=True, slots=True)
class SegmentLoad:
    """A segment to be copied to the device: these extents of a layer, the first of which begins at token `first`."""

    layer: int
    extents: list[int]
    first: int


def segments(extents: int, most: int, first: int) -> Iterator[tuple[int, int]]:
    """Cuts extents [first, extents) into ranges [a, b) of at most `most`."""
    for start in range(first, extents, most):
        yield start, min(start + most, extents)


class SegmentStream(OffloadedKV):
    """Segments of all layers, in order, each loaded while the one before it is read."""

    def __init__(self, host: HostKV, tokens: int, loads: Sequence[SegmentLoad], kv_dtype: str):
        self.host = host
        self.tokens = tokens
        self.loads = loads
        self.kv_dtype = kv_dtype  # what the extents hold
        self._layer = 0
        self._next = 0  # the first load that no layer has read
        self._begun = 0  # loads that the copier has been given

    def segments(self) -> Iterator[KVSegment]:
        layer, self._layer = self._layer, self._layer + 1
        while self._next < len(self.loads) and self.loads[self._next].layer == layer:
            self._load_up_to(self._next + BUFFERS)
            number, load = self._next, self.loads[self._next]
            self.host.copier.wait(number % BUFFERS)
            planes = self.host.buffer(load, number).kept_as(self.kv_dtype).planes[0]
            used = tuple(plane[: len(load.extents)] for plane in planes)
            yield KVSegment(used, load.first, len(load.extents) * self.host.plan.extent_tokens)
            self.host.copier.free(number % BUFFERS)
            self._next += 1
        self._load_up_to(self._next + BUFFERS)  # the next layer's come while this one computes the rest

    def _load_up_to(self, end: int) -> None:
        for number in range(self._begun, min(end, len(self.loads))):
            self.host.copier.start(number % BUFFERS, partial(self.host.load, self.loads[number], number))
            self._begun = number + 1


class Copier(Protocol):
    """Fills numbered buffers beside the computation that reads them."""

    def begin(self) -> None:
        """From here on copies read what was written before."""

    def start(self, buffer: int, copy: Callable[[], None]) -> None:
        """Begin to fill a buffer that has been freed, after all copies begun before."""

    def wait(self, buffer: int) -> None:
        """What is computed from here on finds the buffer filled. Raises what the copy raised."""

    def free(self, buffer: int) -> None:
        """What was computed up to here is the last that reads the buffer."""

    def end(self) -> None:
        """No copy goes on."""


class ThreadCopier(Copier):
    """A thread that copies, for a device that is the CPU: there what was called is done."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-staging")
        self._filling: dict[int, Future[None]] = {}

    def begin(self) -> None:
        assert not self._filling, "one stream at a time"

    def start(self, buffer: int, copy: Callable[[], None]) -> None:
        self._filling[buffer] = self._thread.submit(copy)

    def wait(self, buffer: int) -> None:
        self._filling[buffer].result()

    def free(self, buffer: int) -> None:
        """The computation is over when it returns."""

    def end(self) -> None:
        wait(self._filling.values())
        self._filling.clear()


class StreamCopier(Copier):
    """A CUDA stream that copies, in step with the current one by events; nothing here waits for the device."""

    def __init__(self, streams: Streams):
        self.streams = streams
        self._side = streams.make("kv-staging")
        self._filled = [streams.event() for _ in range(BUFFERS)]
        self._freed = [streams.event() for _ in range(BUFFERS)]

    def begin(self) -> None:
        self._side.wait_stream(self.streams.current())

    def start(self, buffer: int, copy: Callable[[], None]) -> None:
        self._side.wait_event(self._freed[buffer])
        with self.streams.on(self._side):
            copy()
            self._filled[buffer].record(self._side)

    def wait(self, buffer: int) -> None:
        self.streams.current().wait_event(self._filled[buffer])

    def free(self, buffer: int) -> None:
        self._freed[buffer].record(self.streams.current())

    def end(self) -> None:
        self.streams.current().wait_stream(self._side)
