"""The messages of the `Push` stream: chunks to protobuf and back, and their framing. It decides nothing."""

from __future__ import annotations

from kvcache.handoff.chunk import Chunk
from kvcache.transfer.framing import Frame, Framing
from kvcache.transfer.payload import Payload
from serving.messages import LeaseId
from serving.proto import millrace_pb2 as pb
from serving.wire import from_pb, to_pb

PUSH = "/millrace.v1.Decode/Push"
PushFrame = Frame[pb.PushMessage]
framing = Framing(pb.PushMessage, "chunk", "payload")

# The generic mapping would copy the payload. These fields of a chunk cross as they are.
_PLAIN = ("layout", "encoding", "first_layer", "last_layer", "first_head", "last_head", "start", "end", "digest")


def chunk_frame(chunk: Chunk, buffer: int | None = None) -> PushFrame:
    """With its bytes, or, if they lie in one of the receiver's buffers, with that buffer's number."""
    message = pb.Chunk(lease=to_pb(chunk.lease, pb.LeaseId), **{name: getattr(chunk, name) for name in _PLAIN})
    if buffer is None:
        assert isinstance(chunk.payload, bytes | memoryview), "what travels by the stream lies in host memory"
        return Frame(pb.PushMessage(chunk=message), (chunk.payload,))
    message.buffer, message.buffer_bytes = buffer, len(chunk.payload)
    return Frame(pb.PushMessage(chunk=message))


def chunk_from_pb(message: pb.Chunk, payload: Payload) -> Chunk:
    plain = {name: getattr(message, name) for name in _PLAIN}
    return Chunk(lease=from_pb(message.lease, LeaseId), payload=payload, **plain)
