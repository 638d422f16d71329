"""The receiving half of bytes that travel beside a stream: buffers are lent to a transfer, read out, and taken back.

A transfer is a handoff, a get from the KV pool or a put to it. Its headers, fences, digests and answers all go over the
stream, and so does every payload that finds no buffer; what they mean is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.transfer.lending import Lending
from kvcache.transfer.payload import Payload
from serving.messages import TransportOffer

log = logging.getLogger(__name__)

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

GRPC = "grpc"  # the stream itself, as a transport's kind
BUFFER_BYTES = 2 << 20  # a KV chunk or a slab; larger payloads go over the stream
BUFFERS = 4  # lent to one transfer
TRANSFER_BYTES = BUFFERS * BUFFER_BYTES


class TransferUnavailable(Exception):
    """Bytes cannot go this way, so they go over the stream. It is never raised outside of the transports."""


class NoBuffers(TransferUnavailable):
    """Too many transfers are under way at once, which is no fault."""


class MemoryLender:
    """Lends parts of one memory, one part to each transfer. Constructors raise TransferUnavailable.

    `first_address` is where `memory` begins, as senders count. A sender that was lost may still write, so its part
    rests for `rest_seconds` before it is lent again. Bytes are copied out before a digest is computed over them: a late
    write may change a buffer at any time, and nothing else.
    """

    kind: str

    def __init__(self, offer: TransportOffer, memory: Any, first_address: int, rest_seconds: float):
        """`memory` is cut like an array of bytes; what is not one, as a device's, is `taken` alone."""
        self.offer = offer
        self.lending = Lending(len(memory) // TRANSFER_BYTES, rest_seconds)
        self.memory = memory
        self._first_address = first_address

    def lend(self) -> LentBuffers:
        """Buffers for one transfer; none if all are lent."""
        part = self.lending.lend(time.monotonic())
        if part is None:
            return LentBuffers()
        first = self._first_address + part * TRANSFER_BYTES
        return LentBuffers(self, part, tuple(range(first, first + TRANSFER_BYTES, BUFFER_BYTES)), BUFFER_BYTES)

    def at(self, address: int, length: int) -> Bytes:
        """The memory from this address on; no copy."""
        start = address - self._first_address
        part: Bytes = self.memory[start : start + length]
        return part

    async def taken(self, address: int, length: int) -> Payload | None:
        """A copy of what lies in a device's memory, on it where that finds a place; None: it is host memory."""
        return None

    def take_back(self, lent: LentBuffers, *, settled: bool) -> None:
        self.lending.take_back(lent.part, time.monotonic(), settled=settled)

    def close(self) -> None: ...


@dataclass(slots=True)
class LentBuffers:
    """What one transfer may write to: `size` bytes at each of `addresses`. Without a lender nothing is lent."""

    lender: MemoryLender | None = None
    part: int = 0
    addresses: tuple[int, ...] = ()
    size: int = 0

    def __bool__(self) -> bool:
        return self.lender is not None

    @property
    def kind(self) -> str:
        return self.lender.kind if self.lender is not None else GRPC

    @property
    def offer(self) -> TransportOffer:
        """What the sender needs to know to reach the buffers."""
        return self.lender.offer if self.lender is not None else TransportOffer(kind="", details=b"")

    def read(self, index: int, length: int) -> bytes | memoryview:
        """A copy of a buffer's first bytes. What was not lent holds nothing, which its digest then tells."""
        if self.lender is None or index >= len(self.addresses) or length > self.size:
            return b""
        return self.lender.at(self.addresses[index], length).copy().data

    async def taken(self, index: int, length: int) -> Payload:
        """As `read`, of a device's memory too."""
        if self.lender is None or index >= len(self.addresses) or length > self.size:
            return b""
        found = await self.lender.taken(self.addresses[index], length)
        return self.read(index, length) if found is None else found

    def fill(self, parts: Iterable[bytes | memoryview]) -> None:
        """Copy the parts, TRANSFER_BYTES at most, to the first buffer and on, for another process to read."""
        assert self.lender is not None, "only lent buffers are filled"
        address = self.addresses[0]
        for part in parts:
            self.lender.at(address, len(part))[:] = np.frombuffer(part, dtype=np.uint8)
            address += len(part)

    def give_back(self, *, settled: bool) -> None:
        """The transfer is over. Unless `settled`, its sender may still write. Further calls do nothing."""
        lender, self.lender = self.lender, None
        if lender is not None:
            lender.take_back(self, settled=settled)


class MemoryLenders:
    """What one process lends, best kind first. A lender is made when it is first needed, or by `start`."""

    def __init__(self, makers: Mapping[str, Callable[[], MemoryLender]] | None = None):
        self._makers = dict(makers or {})
        self._made: dict[str, MemoryLender | None] = {}
        self._starting = threading.Lock()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._makers)

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        """Of the lenders that have been made."""
        return tuple(lender.offer for lender in self._made.values() if lender is not None)

    def start(self, kind: str) -> None:
        """Make the lender; NIXL takes half a second. Raises TransferUnavailable if the first call cannot."""
        with self._starting:
            if kind in self._made:
                return
            try:
                self._made[kind] = self._makers[kind]()
            except TransferUnavailable:
                self._made[kind] = None
                raise

    def of(self, kind: str) -> MemoryLender | None:
        """The lender, if it has been made."""
        return self._made.get(kind)

    def lend(self, kind: str) -> LentBuffers:
        """Buffers of a lender that has been made; none if it has not, or all are lent."""
        lender = self.of(kind)
        return lender.lend() if lender is not None else LentBuffers()

    async def made(self, kind: str) -> MemoryLender | None:
        """The lender, made now unless it has been; None if it cannot be had."""
        if kind not in self._made:
            try:
                await asyncio.to_thread(self.start, kind)
            except TransferUnavailable as error:
                log.warning("no memory is lent over %s: %s", kind, error)
        return self._made[kind]

    def close(self) -> None:
        for lender in self._made.values():
            if lender is not None:
                lender.close()
        self._made.clear()


class PeerLender:
    """Lends to one peer, by the first of the kinds that has not failed to lead there; `only` one of them if named."""

    def __init__(self, lenders: MemoryLenders | None, only: str | None = None):
        self._lenders = lenders or MemoryLenders()
        self._kinds = [kind for kind in self._lenders.kinds if only in (None, kind)]

    async def lend(self) -> LentBuffers:
        """Buffers for one transfer; none if there is no kind left or all buffers are lent."""
        while self._kinds:
            kind = self._kinds[0]
            lender = await self._lenders.made(kind)
            if lender is not None:
                return lender.lend()
            self.failed(kind)
        return LentBuffers()

    def failed(self, kind: str) -> None:
        """The peer could not use buffers of this kind: none of it are lent to it any more."""
        if kind in self._kinds:
            self._kinds.remove(kind)
