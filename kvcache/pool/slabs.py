"""Slabs on their way from a node to who asked for them: with the message, or in slots the asker lends, told by it.

Both halves, behind the seam of kvcache.slots: whatever that way cannot take goes along with the message instead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvcache.pool.block import Slab
from kvcache.transfer.choice import GRPC, LENDERS, chosen
from kvcache.transfer.framing import bytes_tag, joined, payload_place
from kvcache.transfer.lent_memory import LentBuffers, MemoryLender, RemoteWriter, RemoteWriters, TransferUnavailable
from serving.errors import InvalidRequest
from serving.messages import TransportOffer
from serving.proto import pool_pb2 as pb

log = logging.getLogger(__name__)

GET = "/millrace.v1.Pool/Get"
_PAYLOAD_TAG = bytes_tag(pb.Slab.PAYLOAD_FIELD_NUMBER)


@dataclass(frozen=True, slots=True)
class SlabFrame:
    """A slab's message without its payload, and the payload if that goes along."""

    message: pb.Slab
    payload: bytes | memoryview = b""


END = SlabFrame(pb.Slab(end=True))


def to_wire(frame: SlabFrame) -> bytes:
    return b"".join(joined(frame.message.SerializeToString(), _PAYLOAD_TAG, frame.payload))


def from_wire(data: bytes) -> SlabFrame:
    """Raises google.protobuf.message.DecodeError on what is no slab."""
    place = payload_place(data, 0, _PAYLOAD_TAG)
    if place is not None:
        field, start, end = place
        message = pb.Slab.FromString(data[:field] + data[end:])
        if not message.payload:
            return SlabFrame(message, memoryview(data)[start:end])
    message = pb.Slab.FromString(data)
    payload, message.payload = message.payload, b""
    return SlabFrame(message, payload)


def slab_of(message: pb.Slab, payload: bytes | memoryview, via: str = GRPC) -> Slab:
    return Slab(
        part=message.part,
        indices=tuple(message.indices),
        sizes=tuple(message.sizes),
        digests=message.digests,
        payload=payload,
        via=via,
    )


def framed(slab: Slab) -> SlabFrame:
    message = pb.Slab(part=slab.part, indices=slab.indices, sizes=slab.sizes, digests=slab.digests)
    return SlabFrame(message, slab.payload)


class Delivery:
    """A node's half of one get. `begin` it, turn slabs into frames, tell it of freed slots, `close` it."""

    def __init__(self, writers: Mapping[str, RemoteWriters], request: pb.GetRequest):
        self._carriers = writers
        self._request = request
        self._carrier: RemoteWriter | None = None
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(len(request.slots)):
            self._free.put_nowait(slot)

    async def begin(self) -> None:
        """Reach the slots, if there are any."""
        request, writers = self._request, self._carriers.get(self._request.transport)
        if writers is None or not request.slots:
            return
        try:
            writer = writers.writer(TransportOffer(kind=request.transport, details=request.offer))
            await writer.connect()
        except TransferUnavailable as error:
            log.debug("slabs go along with their messages: %s", error)
            return
        self._carrier = writer

    def freed(self, slot: int) -> None:
        """The asker has taken what was there. Raises InvalidRequest for a slot it did not lend."""
        if not slot < len(self._request.slots):
            raise InvalidRequest(f"slot {slot} was never lent", param="freed")
        self._free.put_nowait(slot)

    async def frame(self, slab: Slab) -> SlabFrame:
        """Waits for a free slot."""
        frame = framed(slab)
        if self._carrier is None or len(slab.payload) > self._request.slot_size:
            return frame
        slot = await self._free.get()
        try:
            await self._carrier.write(slot, self._request.slots[slot], slab.payload)
        except TransferUnavailable as error:
            log.warning("slabs go along with their messages from now on: %s", error)
            await self.close()
            return frame
        frame.message.slot, frame.message.slot_bytes = slot, len(slab.payload)
        return SlabFrame(frame.message)

    async def close(self) -> None:
        writer, self._carrier = self._carrier, None
        if writer is not None:
            await writer.settle()


class LendersOnDemand:
    """What one process lends to the nodes it asks, best first: made when it is first needed, one of a kind."""

    def __init__(self, kv_transport: str):
        self.kinds = chosen(kv_transport)
        self._made: dict[str, MemoryLender | None] = {}
        self._making = threading.Lock()

    async def of(self, kind: str) -> MemoryLender | None:
        """None where it cannot be had."""
        if kind not in self._made:
            await asyncio.to_thread(self._make, kind)
        return self._made[kind]

    def _make(self, kind: str) -> None:
        """NIXL takes a while to start."""
        with self._making:
            if kind in self._made:
                return
            try:
                self._made[kind] = LENDERS[kind]()
            except TransferUnavailable as error:
                log.warning("slabs are not taken over %s: %s", kind, error)
                self._made[kind] = None

    def close(self) -> None:
        for lender in self._made.values():
            if lender is not None:
                lender.close()
        self._made.clear()


class Ways:
    """How one node sends slabs here: by the first of the kinds that has not failed to lead there."""

    def __init__(self, lenders: LendersOnDemand | None):
        self._landings = lenders
        self._kinds = list(lenders.kinds) if lenders is not None else []

    async def arrival(self) -> SlabArrival:
        """For one get."""
        while self._kinds and self._landings is not None:
            lender = await self._landings.of(self._kinds[0])
            if lender is not None:
                return SlabArrival(self, lender, lender.lend())
            self._kinds.pop(0)
        return SlabArrival(self, None, None)

    def leads_nowhere(self, kind: str) -> None:
        if self._kinds and self._kinds[0] == kind:
            self._kinds.pop(0)


class SlabArrival:
    """The asker's half of one get: lends slots, takes slabs out of them or from messages, takes the slots back."""

    def __init__(self, ways: Ways, lender: MemoryLender | None, slots: LentBuffers | None):
        self._ways = ways
        self._landing = lender
        self._slots = slots
        self._settled = False

    def lend(self, request: pb.GetRequest) -> None:
        """Put into the request what it may write to."""
        if self._landing is not None and self._slots is not None:
            (offer,) = self._landing.offers
            request.transport, request.offer = offer.kind, offer.details
            request.slots.extend(self._slots.addresses)
            request.slot_size = self._slots.size

    def take(self, frame: SlabFrame) -> tuple[Slab, int | None]:
        """The slab, and the slot that is free again. What lies in a slot is copied before anybody checks it."""
        message, payload = frame.message, frame.payload
        if message.HasField("slot"):
            slot = message.slot
            if self._landing is None or self._slots is None:
                return slab_of(message, b""), None  # nothing was lent, so nothing is there
            data = self._landing.read(self._slots, slot, message.slot_bytes)
            return slab_of(message, data, self._landing.kind), slot
        if self._landing is not None and self._slots is not None and 0 < len(payload) <= self._slots.size:
            self._ways.leads_nowhere(self._landing.kind)
        return slab_of(message, payload), None

    def settled(self) -> None:
        """The node has ended its stream: it writes no more."""
        self._settled = True

    def close(self) -> None:
        if self._landing is not None and self._slots is not None:
            self._landing.take_back(self._slots, settled=self._settled)
            self._slots = None
