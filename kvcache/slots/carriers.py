"""The seam for bytes that travel beside the stream: a carrier writes them into slots that the receiver lends.

A transfer is a handoff, or a fetch from the KV pool. Everything else about its bytes, header, fence and digest, and
every answer, goes over the stream; so a carrier has no ending, no errors of its own to report, and can be done without
at any moment.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from serving.messages import TransportOffer


class CarrierFailed(Exception):
    """Bytes cannot go this way; they go over the stream instead. It never leaves the transports."""


class NoSlots(CarrierFailed):
    """Too many transfers at once, which is nobody's fault."""


@dataclass(frozen=True, slots=True)
class Slots:
    """What one transfer may write to: `size` bytes at each of these addresses in the receiver's memory."""

    number: int  # which of the receiver's sets this is
    addresses: tuple[int, ...]
    size: int


class Carrier(Protocol):
    """The sending half, one for each transfer."""

    kind: str

    async def connect(self) -> None:
        """Make the receiver's memory reachable. Raises CarrierFailed."""
        ...

    def write(self, slot: int, address: int, payload: bytes | memoryview) -> Future[None]:
        """Begin to copy the payload to the address in the receiver's memory; done when all of it lies there.

        `slot` is this end's name for it: at most one write for a slot is in progress. Fails with CarrierFailed.
        """
        ...

    async def settle(self) -> bool:
        """Wait, not for ever, for the writes in progress; whether none is left. Nothing may be written any more."""
        ...


class Carriers(Protocol):
    """The sending half of a process, which lends what a transfer needs."""

    kind: str

    def prepare(self) -> None:
        """Start what takes a while, unless that has happened. What fails now will fail again when it is needed."""
        ...

    def carrier(self, offer: TransportOffer) -> Carrier:
        """A carrier to whoever made the offer. Raises CarrierFailed where it is known that none leads there."""
        ...

    def close(self) -> None: ...


class Landing(Protocol):
    """The receiving half, one for each worker that is written to."""

    kind: str
    offers: tuple[TransportOffer, ...]

    def lend(self) -> Slots | None:
        """Slots for one transfer; None when all are lent."""
        ...

    def read(self, slots: Slots, index: int, length: int) -> bytes | memoryview:
        """A copy of a slot's first bytes, which no late write can change; none of a slot that is not there."""
        ...

    def take_back(self, slots: Slots, *, settled: bool) -> None:
        """The transfer is over. Unless `settled`, its sender may still write: the slots rest before they are lent."""
        ...

    def close(self) -> None: ...


class Landings:
    """All that one decode worker offers beside the stream, best first."""

    def __init__(self, landings: Iterable[Landing] = ()):
        self._landings = {landing.kind: landing for landing in landings}
        self.offers = tuple(offer for landing in self._landings.values() for offer in landing.offers)

    def of(self, kind: str) -> Landing | None:
        return self._landings.get(kind)

    def close(self) -> None:
        for landing in self._landings.values():
            landing.close()
