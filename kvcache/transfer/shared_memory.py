"""Memory that two processes of one host share: the lender of its buffers, and the writer that fills them.

The memory is an anonymous file, so it is gone with the process that made it, however that ends. A process that cannot
open it, on another host, in another container or as another user, finds that out at once and takes another transport.
"""

from __future__ import annotations

import asyncio

import numpy as np

from kvcache.transfer.lent_memory import TRANSFER_BYTES, Bytes, MemoryLender, TransferUnavailable
from kvcache.transfer.payload import Payload
from serving import shared_memory
from serving.messages import TransportOffer
from serving.shared_memory import DETAILS, FIRST_BYTE, Segment, SegmentUnavailable, available

__all__ = [
    "DETAILS",
    "Segment",
    "SharedMemoryLender",
    "SharedMemoryWriter",
    "SharedMemoryWriters",
    "available",
    "mapped",
]

KIND = "shm"
TRANSFERS = 16  # at a time; more go another way. Memory is taken up when it is first written to: 128 MiB in all
REST_SECONDS = 5.0  # how long the buffers of a lost sender rest: its writes are copies, over in a moment


def mapped(details: bytes) -> Bytes:
    """Another process's segment, all of it. Raises TransferUnavailable where that cannot be had from here."""
    try:
        return shared_memory.mapped(details)
    except SegmentUnavailable as error:
        raise TransferUnavailable(str(error)) from error


class SharedMemoryLender(MemoryLender):
    """Lends a segment of shared memory. Raises TransferUnavailable where there is no such memory."""

    kind = KIND

    def __init__(self) -> None:
        if not available():
            raise TransferUnavailable("this system has no anonymous files to share memory by")
        try:
            self.segment = Segment(TRANSFERS * TRANSFER_BYTES)
        except OSError as error:
            raise TransferUnavailable(f"no memory can be shared: {error}") from error
        offer = TransportOffer(kind=KIND, details=self.segment.details)
        super().__init__(offer, self.segment.memory[FIRST_BYTE:], FIRST_BYTE, REST_SECONDS)

    def close(self) -> None:
        self.segment.close()


class SharedMemoryWriters:
    """The sending half of a process (kvcache.transfer.remote_write.RemoteWriters)."""

    def prepare(self) -> None:
        """There is nothing to start."""

    def writer(self, offer: TransportOffer) -> SharedMemoryWriter:
        return SharedMemoryWriter(mapped(offer.details))

    def close(self) -> None:
        """Each transfer lets go of what it has mapped."""


class SharedMemoryWriter:
    """One transfer's writes (remote_write.RemoteWriter): plain copies, each over before `write` returns."""

    kind = KIND
    room = None

    def __init__(self, memory: Bytes):
        self._memory: Bytes | None = memory

    async def connect(self) -> None:
        """The memory is mapped already."""

    def write(self, buffer: int, address: int, payload: Payload) -> asyncio.Future[None]:
        assert isinstance(payload, bytes | memoryview), "it has no room on a device"
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        memory, end = self._memory, address + len(payload)
        if memory is None or not FIRST_BYTE <= address <= end <= len(memory):
            written.set_exception(TransferUnavailable("a buffer lies outside of the memory on offer"))
            written.exception()  # no caller may be left to ask
        else:
            memory[address:end] = np.frombuffer(payload, dtype=np.uint8)
            written.set_result(None)
        return written

    async def settle(self) -> bool:
        self._memory = None
        return True
