"""The messages of the `Push` stream: chunks and commits to protobuf and back, and their framing. It decides nothing."""

from __future__ import annotations

from kvcache.handoff.chunk import Chunk, Commit
from kvcache.transfer.framing import Frame, Framing
from serving.messages import LeaseId
from serving.proto import millrace_pb2 as pb
from serving.wire import from_pb, to_pb

PUSH = "/millrace.v1.Decode/Push"
PushFrame = Frame[pb.PushMessage]
framing = Framing(pb.PushMessage, "chunk", "payload")


def chunk_frame(chunk: Chunk, buffer: int | None = None) -> PushFrame:
    """With its bytes, or, if they lie in one of the receiver's buffers, with that buffer's number."""
    message = pb.Chunk(
        lease=to_pb(chunk.lease, pb.LeaseId),
        layout=chunk.layout,
        first_layer=chunk.first_layer,
        last_layer=chunk.last_layer,
        start=chunk.start,
        end=chunk.end,
        digest=chunk.digest,
        encoding=chunk.encoding,
        first_head=chunk.first_head,
        last_head=chunk.last_head,
        buffer=buffer,
        buffer_bytes=0 if buffer is None else len(chunk.payload),
    )
    return Frame(pb.PushMessage(chunk=message), (chunk.payload,) if buffer is None else ())


def chunk_from_pb(message: pb.Chunk, payload: bytes | memoryview) -> Chunk:
    return Chunk(
        lease=from_pb(message.lease, LeaseId),
        layout=message.layout,
        first_layer=message.first_layer,
        last_layer=message.last_layer,
        start=message.start,
        end=message.end,
        payload=payload,
        digest=message.digest,
        encoding=message.encoding,
        first_head=message.first_head,
        last_head=message.last_head,
    )


def commit_frame(commit: Commit) -> PushFrame:
    message = pb.Commit(lease=to_pb(commit.lease, pb.LeaseId), first_token=commit.first_token, digest=commit.digest)
    return Frame(pb.PushMessage(commit=message))


def commit_from_pb(message: pb.Commit) -> Commit:
    return Commit(lease=from_pb(message.lease, LeaseId), first_token=message.first_token, digest=message.digest)
