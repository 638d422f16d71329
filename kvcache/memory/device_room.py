"""Memory of a device that chunks of KV lie in on their way from one device to another: a room with places for them.

A place is free again once nobody holds the payload in it, however that came about. Nothing here waits for what the
device computes. It knows bytes and streams, and nothing of layers or transports.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue

from torch import Tensor

from kvcache.memory.staging_ring import KV_AT, StagingPlace, ring_of
from serving.streams import Stream, Streams

PATIENCE = 0.5  # seconds that a chunk waits for a place, before it passes through host memory
WORD = 8  # bytes: what leaves are digested by


class DevicePayload:
    """A chunk's bytes on a device, which hold a place of `room` as long as anybody holds this.

    `leaves` are the digests of their leaves (kvcache.handoff.tree_digest).
    """

    def __init__(self, room: DeviceRoom, place: StagingPlace, size: int, leaves: bytes) -> None:
        self.room, self.place, self.size, self.leaves = room, place, size, leaves

    def __len__(self) -> int:
        return self.size

    @property
    def bytes_there(self) -> Tensor:
        """On the device: uint8 [size]."""
        return self.place.device[KV_AT : KV_AT + self.size]

    @property
    def address(self) -> int:
        return self.room.streams.address(self.bytes_there)

    def to_host(self) -> memoryview:
        """A copy in host memory. The calling thread waits for it: not on the event loop."""
        return copied_to_host(self.room.streams, self.bytes_there)


def copied_to_host(streams: Streams, source: Tensor) -> memoryview:
    """These bytes of the device, no more than a place of the ring takes. The calling thread waits for them."""
    ring, size = ring_of(streams), len(source)
    with ring.place(ring.outward) as passing:
        passing.host[KV_AT : KV_AT + size].copy_(source, non_blocking=True)
        passing.wait()
        return memoryview(passing.kv[:size].tobytes())


class DeviceRoom:
    """`places` for payloads of up to `most` bytes each, in one piece of the device's memory."""

    def __init__(self, streams: Streams, places: int, most: int) -> None:
        each = KV_AT + most
        self.streams, self.most = streams, most
        self.memory = streams.room(places * each)
        self._free: SimpleQueue[StagingPlace] = SimpleQueue()
        for first in range(0, places * each, each):
            self._free.put(StagingPlace(streams, self.memory[first : first + each]))

    def takes(self, size: int) -> bool:
        """Whether it holds so many bytes, and can have them digested."""
        return 0 < size <= self.most and size % WORD == 0

    @contextmanager
    def working(self, place: StagingPlace, stream: Stream) -> Iterator[StagingPlace]:
        """What is launched inside goes to this stream, and has been done when it is left."""
        place.stream = stream
        try:
            with self.streams.on(stream):
                yield place
        finally:
            place.wait()

    def free_place(self) -> StagingPlace | None:
        """One that is the caller's; None where there is none for a while. It waits: not on the event loop."""
        try:
            return self._free.get(timeout=PATIENCE)
        except Empty:
            return None

    def give_back(self, place: StagingPlace) -> None:
        self._free.put(place)

    def payload(self, place: StagingPlace, size: int, leaves: bytes) -> DevicePayload:
        """What lies in the caller's place, which is given back with it."""
        made = DevicePayload(self, place, size, leaves)
        weakref.finalize(made, self.give_back, place).atexit = False
        return made

    def digest(self, place: StagingPlace, size: int) -> int:
        """Launch the digests of a place's leaves, which lie right before its KV then; how many bytes they take."""
        from serving.kernels.gpu.leaf_digests import DIGEST_BYTES, LEAF, leaf_digests  # it imports triton

        digests = -(-size // LEAF) * DIGEST_BYTES
        into, words = place.device[KV_AT - digests : KV_AT], ring_of(self.streams).digest_words
        self.streams.launch(partial(leaf_digests, size=size), words, place.device[KV_AT:], into)
        return digests

    def taken(self, source: Tensor) -> DevicePayload | None:
        """A copy of these bytes of the device, and the digests of its leaves; None where they find no place.

        What they are copied from may be written to meanwhile, and later: what is checked is what is used.
        """
        from serving.kernels.gpu.leaf_digests import as_digests

        place = self.free_place() if self.takes(len(source)) else None
        if place is None:
            return None
        ring, size = ring_of(self.streams), len(source)
        payload = self.payload(place, size, b"")
        with self.working(place, ring.inward):
            payload.bytes_there.copy_(source)
            digests = self.digest(place, size)
            place.download(KV_AT - digests, KV_AT)
        payload.leaves = as_digests(place.host[KV_AT - digests : KV_AT].numpy().tobytes())
        return payload
