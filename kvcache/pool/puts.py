"""Blocks on their way to a node: along with their messages, or left in memory that the node can read, told by them.

Only one host's memory can be read so; a node that cannot says so once, and blocks go along with their messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.pool.block import PoolBlock
from kvcache.pool.slabs import LendersOnDemand
from kvcache.transfer.framing import bytes_tag, payload_place, varint
from kvcache.transfer.lent_memory import LentBuffers, TransferUnavailable
from kvcache.transfer.shared_memory import KIND as SHM
from kvcache.transfer.shared_memory import PART_BYTES, SharedMemoryLender, mapped
from serving.errors import CorruptChunk, InvalidRequest
from serving.proto import pool_pb2 as pb

PUT = "/millrace.v1.Pool/Put"
PUT_BYTES = PART_BYTES  # sent in one call: what a timeout has to be enough for, and what shared memory has room for
UNREADABLE = "memory"  # the field at fault when a node cannot read what it is told to
_PAYLOAD_TAG = bytes_tag(pb.PutRequest.PAYLOAD_FIELD_NUMBER)


@dataclass(frozen=True, slots=True)
class PutFrame:
    """The blocks' message without their payload, and the pieces of that if it goes along."""

    message: pb.PutRequest
    payload: Sequence[bytes | memoryview] = ()


def to_wire(frame: PutFrame) -> bytes:
    size = sum(map(len, frame.payload))
    return b"".join((frame.message.SerializeToString(), bytes((_PAYLOAD_TAG,)), varint(size), *frame.payload))


def from_wire(data: bytes) -> PutFrame:
    """Raises google.protobuf.message.DecodeError on what is no put."""
    place = payload_place(data, 0, _PAYLOAD_TAG)
    if place is not None:
        field, start, end = place
        message = pb.PutRequest.FromString(data[:field] + data[end:])
        if not message.payload:
            return PutFrame(message, (memoryview(data)[start:end],))
    message = pb.PutRequest.FromString(data)
    payload, message.payload = message.payload, b""
    return PutFrame(message, (payload,))


def framed(blocks: Sequence[PoolBlock]) -> PutFrame:
    """All of it along with the message."""
    listed = [pb.PoolBlock(key=b.key, namespace=b.namespace, sizes=b.sizes, digests=b.digests) for b in blocks]
    return PutFrame(pb.PutRequest(blocks=listed), [block.payload for block in blocks])


def taken(frame: PutFrame) -> list[PoolBlock]:
    """A node's half: the blocks, with bytes of their own.

    Raises InvalidRequest where they lie in memory that cannot be read from here, CorruptChunk where their sizes are not
    those of the payload.
    """
    message = frame.message
    payload = _read(message) if message.HasField("address") else memoryview(b"".join(frame.payload))
    blocks, start = [], 0
    for block in message.blocks:
        end = start + sum(block.sizes)
        blocks.append(
            PoolBlock(
                key=block.key,
                namespace=block.namespace,
                sizes=tuple(block.sizes),
                digests=block.digests,
                payload=bytes(payload[start:end]),
            )
        )
        start = end
    if start != len(payload):
        raise CorruptChunk("the blocks of a put do not add up to its bytes", code="length")
    return blocks


def _read(message: pb.PutRequest) -> memoryview:
    size = sum(sum(block.sizes) for block in message.blocks)
    try:
        memory = mapped(message.memory)
    except TransferUnavailable as error:
        raise InvalidRequest(f"the blocks' bytes cannot be read: {error}", param=UNREADABLE) from error
    if message.address + size > len(memory):
        raise InvalidRequest("the blocks' bytes lie beyond the memory that was offered", param=UNREADABLE)
    return memory.data[message.address : message.address + size]


def batches(blocks: Iterable[PoolBlock]) -> Iterator[list[PoolBlock]]:
    """The blocks in lists of at least one and of about PUT_BYTES at most."""
    batch: list[PoolBlock] = []
    size = 0
    for block in blocks:
        if batch and size + len(block.payload) > PUT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(block)
        size += len(block.payload)
    if batch:
        yield batch


class Leaving:
    """How blocks go to one node, as far as that is known."""

    def __init__(self, lenders: LendersOnDemand | None):
        self._landings = lenders if lenders is not None and SHM in lenders.kinds else None

    async def room(self, size: int) -> Room:
        """For a put of so many bytes."""
        lender = await self._landings.of(SHM) if self._landings is not None else None
        if not isinstance(lender, SharedMemoryLender) or size > PART_BYTES:
            return Room(None, None)
        return Room(lender, lender.lend())

    def leads_nowhere(self) -> None:
        self._landings = None


class Room:
    """Where the blocks of one put lie until the node has answered. `close` it then."""

    def __init__(self, lender: SharedMemoryLender | None, slots: LentBuffers | None):
        self._landing = lender
        self._slots = slots
        self.shared = slots is not None

    def frame(self, blocks: Sequence[PoolBlock]) -> PutFrame:
        """The blocks as they go; if their bytes stay here, they have been copied."""
        frame = framed(blocks)
        if self._landing is None or self._slots is None:
            return frame
        message, segment = frame.message, self._landing.segment
        message.address, message.memory = self._slots.addresses[0], segment.details
        start = message.address
        for piece in frame.payload:
            segment.memory[start : start + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            start += len(piece)
        return PutFrame(message)

    def close(self, *, answered: bool) -> None:
        """Unless it has answered, the node may still read: what it finds then, a digest tells."""
        if self._landing is not None and self._slots is not None:
            self._landing.take_back(self._slots, settled=answered)
            self._slots = None
