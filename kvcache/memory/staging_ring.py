"""Pinned memory that KV passes through between a device and the host: a ring of bounded size, shared by all copies.

A place in it is held by one copy at a time; who finds none free waits, in a thread of its own. It knows bytes and the
streams they move on, and nothing of layers or blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.host_copy import Bytes
from serving.streams import Event, Stream, Streams, recorded

PLACES = 4  # one is filled, one emptied, while two are on their way
PLACE_BYTES = 4 << 20  # of KV: a chunk of a handoff has about half
MOST_BLOCKS = 2048  # of one copy
HEAD_BYTES = 8 * MOST_BLOCKS  # their numbers, before the KV: one copy takes both to the device
DIGESTS_BYTES = 4096  # between the two, what the device computes of the KV: one copy takes both from it
KV_AT = HEAD_BYTES + DIGESTS_BYTES


class StagingPlace:
    """Memory for one copy, pinned on the host and as much on the device, and the event behind it.

    With `device`, memory of its own there, uint8, the host has room for what is before the KV alone.
    """

    def __init__(self, streams: Streams, device: Tensor | None = None) -> None:
        self.host: Tensor = streams.pinned(KV_AT + (PLACE_BYTES if device is None else 0))
        self.device: Tensor = streams.room(KV_AT + PLACE_BYTES) if device is None else device
        self._done: Event = streams.event()
        self.stream: Stream | None = None  # the one that works here, until that has been waited for
        self.kv: Bytes = self.host.numpy()[KV_AT:]
        self._numbers = self.host.numpy()[:HEAD_BYTES].view(np.int64)

    def name(self, blocks: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        """These are the copy's blocks, MOST_BLOCKS at most."""
        self._numbers[: len(blocks)] = blocks

    def upload(self, start: int, end: int) -> None:
        """Bytes of the host's side to the device's, on the current stream."""
        self.device[start:end].copy_(self.host[start:end], non_blocking=True)

    def wait(self) -> None:
        """Until what this copy has been given to do is done."""
        if self.stream is not None:
            self._done.record(self.stream)
            self._done.synchronize()
            self.stream = None

    def download(self, start: int, end: int) -> None:
        """Bytes of the device's side to the host's, on the current stream."""
        self.host[start:end].copy_(self.device[start:end], non_blocking=True)


class StagingRing:
    """The places of one device, and the two streams that copies run on: a device copies both ways at once."""

    def __init__(self, streams: Streams) -> None:
        self.outward: Stream = streams.make("kv-out")
        self.inward: Stream = streams.make("kv-in")
        self._streams = streams
        self._words: Tensor | None = None
        self._free: SimpleQueue[StagingPlace] = SimpleQueue()
        for _ in range(PLACES):
            self._free.put(StagingPlace(streams))

    @property
    def digest_words(self) -> Tensor:
        """The constants of serving.kernels.gpu.leaf_digests, on the device."""
        if self._words is None:
            from serving.kernels.gpu.leaf_digests import constants  # it imports triton, which is not everywhere

            self._words = there_for_all(self._streams, constants())
        return self._words

    @contextmanager
    def place(self, stream: Stream) -> Iterator[StagingPlace]:
        """A place of one's own, to be worked in on this stream, which is current meanwhile.

        Waits until one is free: neither on the event loop nor under a lock.
        """
        place = self._free.get()
        place.stream = stream
        try:
            with self._streams.on(stream):
                yield place
        finally:
            try:
                place.wait()  # where the copy has broken off
            finally:  # a device that fails fails the next copy as well, which would else wait for a place for ever
                self._free.put(place)


def there_for_all(streams: Streams, numbers: Tensor) -> Tensor:
    """These int64 on the device, for every stream of it; the host waits until they are there."""
    host = streams.pinned(numbers.nbytes).view(torch.int64).view(numbers.shape)
    there = streams.uploaded(host.copy_(numbers))
    recorded(streams).synchronize()
    return there


_rings: WeakKeyDictionary[Streams, StagingRing] = WeakKeyDictionary()
_making = Lock()


def ring_of(streams: Streams) -> StagingRing:
    """The one ring of this device, made when it is first needed."""
    with _making:
        if streams not in _rings:
            _rings[streams] = StagingRing(streams)
        return _rings[streams]
