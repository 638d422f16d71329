"""The seam for bytes that travel beside the stream: a writer writes them into slots that the receiver lends.

A transfer is a handoff, or a fetch from the KV pool. Everything else about its bytes, header, fence and digest, and
every answer, goes over the stream; so a writer has no ending, no errors of its own to report, and can be done without
at any moment.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from serving.messages import TransportOffer


class TransferUnavailable(Exception):
    """Bytes cannot go this way; they go over the stream instead. It never leaves the transports."""


class NoBuffers(TransferUnavailable):
    """Too many transfers at once, which is nobody's fault."""


@dataclass(frozen=True, slots=True)
class LentBuffers:
    """What one transfer may write to: `size` bytes at each of these addresses in the receiver's memory."""

    number: int  # which of the receiver's sets this is
    addresses: tuple[int, ...]
    size: int


class RemoteWriter(Protocol):
    """The sending half, one for each transfer."""

    kind: str

    async def connect(self) -> None:
        """Make the receiver's memory reachable. Raises TransferUnavailable."""
        ...

    def write(self, slot: int, address: int, payload: bytes | memoryview) -> Future[None]:
        """Begin to copy the payload to the address in the receiver's memory; done when all of it lies there.

        `slot` is this end's name for it: at most one write for a slot is in progress. Fails with TransferUnavailable.
        """
        ...

    async def settle(self) -> bool:
        """Wait, not for ever, for the writes in progress; whether none is left. Nothing may be written any more."""
        ...


class RemoteWriters(Protocol):
    """The sending half of a process, which lends what a transfer needs."""

    kind: str

    def prepare(self) -> None:
        """Start what takes a while, unless that has happened. What fails now will fail again when it is needed."""
        ...

    def writer(self, offer: TransportOffer) -> RemoteWriter:
        """A writer to whoever made the offer. Raises TransferUnavailable where it is known that none leads there."""
        ...

    def close(self) -> None: ...


class MemoryLender(Protocol):
    """The receiving half, one for each worker that is written to."""

    kind: str
    offers: tuple[TransportOffer, ...]

    def lend(self) -> LentBuffers | None:
        """Slots for one transfer; None when all are lent."""
        ...

    def read(self, slots: LentBuffers, index: int, length: int) -> bytes | memoryview:
        """A copy of a slot's first bytes, which no late write can change; none of a slot that is not there."""
        ...

    def take_back(self, slots: LentBuffers, *, settled: bool) -> None:
        """The transfer is over. Unless `settled`, its sender may still write: the slots rest before they are lent."""
        ...

    def close(self) -> None: ...


class MemoryLenders:
    """All that one decode worker offers beside the stream, best first."""

    def __init__(self, lenders: Iterable[MemoryLender] = ()):
        self._landings = {lender.kind: lender for lender in lenders}
        self.offers = tuple(offer for lender in self._landings.values() for offer in lender.offers)

    def of(self, kind: str) -> MemoryLender | None:
        return self._landings.get(kind)

    def close(self) -> None:
        for lender in self._landings.values():
            lender.close()
