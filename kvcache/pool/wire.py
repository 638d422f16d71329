"""The pool's messages that carry payloads to protobuf and back, and their framing: blocks of a put, slabs of a get.

All others cross as serving/wire.py has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvcache.pool.block import PoolBlock, Slab, cut
from kvcache.transfer.framing import Frame, Framing
from kvcache.transfer.lent_memory import GRPC, TRANSFER_BYTES, LentBuffers, TransferUnavailable
from kvcache.transfer.shared_memory import mapped
from serving.errors import CorruptChunk, InvalidRequest
from serving.proto import pool_pb2 as pb

PUT = "/millrace.v1.Pool/Put"
GET = "/millrace.v1.Pool/Get"
PUT_BYTES = TRANSFER_BYTES  # sent in one call: what a timeout has to be enough for, and what is lent to one transfer
UNREADABLE = "memory"  # the field at fault when a node cannot read what it is told to

PutFrame = Frame[pb.PutRequest]
SlabFrame = Frame[pb.Slab]
put_framing = Framing(pb.PutRequest, "payload")
slab_framing = Framing(pb.Slab, "payload")

END: SlabFrame = Frame(pb.Slab(end=True))

# ---- a put: blocks travel with their message, or lie in lent memory that a node of the same host reads ---------------


def put_frame(blocks: Sequence[PoolBlock], lent: LentBuffers) -> PutFrame:
    """The blocks as they are sent. If buffers are lent, the payloads have been copied there for the node to read."""
    listed = [pb.PoolBlock(key=b.key, namespace=b.namespace, sizes=b.sizes, digests=b.digests) for b in blocks]
    payloads = [block.payload for block in blocks]
    if not lent:
        return Frame(pb.PutRequest(blocks=listed), payloads)
    lent.fill(payloads)
    return Frame(pb.PutRequest(blocks=listed, address=lent.addresses[0], memory=lent.offer.details))


def blocks_of(frame: PutFrame) -> list[PoolBlock]:
    """The blocks of a put that was received, with bytes of their own.

    Raises InvalidRequest if they lie in memory that cannot be read from here, CorruptChunk if their sizes do not add up
    to the payload.
    """
    message = frame.message
    sizes = [sum(block.sizes) for block in message.blocks]
    payload = _read(message, sum(sizes)) if message.HasField("address") else frame.payload
    if sum(sizes) != len(payload):
        raise CorruptChunk("the blocks of a put do not add up to its bytes", code="length")
    return [
        PoolBlock(key=b.key, namespace=b.namespace, sizes=tuple(b.sizes), digests=b.digests, payload=bytes(data))
        for b, data in zip(message.blocks, cut(payload, sizes), strict=True)
    ]


def _read(message: pb.PutRequest, size: int) -> memoryview:
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


# ---- a get: slabs travel with their message, or are written into buffers that the asker lends ------------------------


def slab_frame(slab: Slab, buffer: int | None = None) -> SlabFrame:
    """With its bytes, or, if they lie in one of the asker's buffers, with that buffer's number."""
    message = pb.Slab(part=slab.part, indices=slab.indices, sizes=slab.sizes, digests=slab.digests)
    if buffer is None:
        return Frame(message, (slab.payload,))
    message.buffer, message.buffer_bytes = buffer, len(slab.payload)
    return Frame(message)


def slab_of(message: pb.Slab, payload: bytes | memoryview, via: str = GRPC) -> Slab:
    indices, sizes = tuple(message.indices), tuple(message.sizes)
    return Slab(part=message.part, indices=indices, sizes=sizes, digests=message.digests, payload=payload, via=via)
