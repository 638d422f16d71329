"""The sending half of bytes that travel beside a stream: payloads are written into buffers that the other end lends.

A writer fails by TransferUnavailable alone, at any moment, and its payload then goes over the stream: nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kvcache.transfer.lent_memory import NoBuffers, TransferUnavailable
from kvcache.transfer.payload import Payload, Room
from serving.errors import InvalidRequest
from serving.messages import TransportOffer

log = logging.getLogger(__name__)


class RemoteWriter(Protocol):
    """One transfer's writes into the other end's memory."""

    kind: str

    @property
    def room(self) -> Room | None:
        """Where on this process's device payloads may lie that are written from there, once it is connected."""
        ...

    async def connect(self) -> None:
        """Make the other end's memory reachable. Raises TransferUnavailable."""

    def write(self, buffer: int, address: int, payload: Payload) -> Future[None]:
        """Begin to copy the payload to the address; done when all of it is there. Fails with TransferUnavailable.

        At most one write to a `buffer` is in progress.
        """
        ...

    async def settle(self) -> bool:
        """Wait, not for ever, for the writes in progress: True if none is left. Nothing may be written afterwards."""
        ...


class RemoteWriters(Protocol):
    """What a process writes through: one for all its transfers of a kind."""

    def prepare(self) -> None:
        """Start what takes a while, unless that has happened. What fails now will fail again when it is needed."""

    def writer(self, offer: TransportOffer) -> RemoteWriter:
        """A writer to the memory on offer. Raises TransferUnavailable if it is known that none leads there."""
        ...

    def close(self) -> None:
        """Let go of what is shared by transfers."""


def writer_to(writers: Mapping[str, RemoteWriters], offers: Iterable[TransportOffer]) -> RemoteWriter | None:
    """A writer by the first offer whose kind this process has too and that leads there; None if there is none."""
    for offer in offers:
        if offer.kind in writers:
            try:
                return writers[offer.kind].writer(offer)
            except TransferUnavailable as error:
                log.debug("%s does not lead to the other end: %s", offer.kind, error)
    return None


class BufferSender:
    """One transfer's way into lent buffers: `connect`, tell it what is `lent`, `write` to a `buffer`, and `settle`.

    After a failure it takes nothing more.
    """

    def __init__(self, writer: RemoteWriter | None, peer: str):
        self._free: asyncio.Queue[int | None] = asyncio.Queue()  # may be written to; None: there will be none
        self._writer = writer
        self._peer = peer
        self._addresses: tuple[int, ...] = ()
        self._size = 0

    @property
    def kind(self) -> str:
        """The writer's; empty if there is none."""
        return self._writer.kind if self._writer is not None else ""

    @property
    def room(self) -> Room | None:
        """The writer's, as long as payloads are written into buffers."""
        return self._writer.room if self._writer is not None and self._size else None

    async def connect(self) -> None:
        if self._writer is None:
            return
        try:
            await self._writer.connect()
        except TransferUnavailable as error:
            level = logging.DEBUG if isinstance(error, NoBuffers) else logging.WARNING
            log.log(level, "KV goes to %s over gRPC: %s", self._peer, error)
            await self._do_without()

    async def lent(self, addresses: Sequence[int], size: int) -> None:
        """The other end lends `size` bytes at each of these addresses; with none of them no writer is needed."""
        self._addresses, self._size = tuple(addresses), size
        for buffer in range(len(addresses)):
            self._free.put_nowait(buffer)
        if not addresses:
            await self._do_without()

    def freed(self, buffer: int) -> None:
        """The other end has taken what was there. Raises InvalidRequest for a buffer it did not lend."""
        if not buffer < len(self._addresses):
            raise InvalidRequest(f"buffer {buffer} was never lent", param="freed_buffer")
        self._free.put_nowait(buffer)

    def takes(self, payload: Payload) -> bool:
        return self._writer is not None and 0 < len(payload) <= self._size

    def free(self) -> int | None:
        """A buffer that may be written to now."""
        return None if self._free.empty() else self._free.get_nowait()

    async def buffer(self, payload: Payload) -> int | None:
        """A buffer to write it to, as soon as there is one; None if it has to go over the stream."""
        while self.takes(payload):
            found = await self._free.get()
            if found is None:
                self._free.put_nowait(None)  # for whoever waits beside
            elif self.takes(payload):
                return found
        return None

    def write(self, buffer: int, payload: Payload) -> Future[None]:
        """Begin to write to a free buffer; see RemoteWriter.write."""
        assert self._writer is not None, "only what is taken is written"
        return self._writer.write(buffer, self._addresses[buffer], payload)

    async def arrived(self, written: Future[None]) -> bool:
        """Wait for a write: False if it failed, and its payload has to go over the stream."""
        try:
            await written
        except TransferUnavailable as error:
            if self._size:
                log.warning("KV goes to %s over gRPC from now on: %s", self._peer, error)
            self._size = 0
            self._free.put_nowait(None)  # whoever waits for a buffer would wait for ever
            return False
        return True

    async def settle(self) -> bool:
        """True if no write is in progress any more. Nothing may be written afterwards."""
        return await self._writer.settle() if self._writer is not None else True

    async def _do_without(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.settle()
