"""Messages of the `Push` stream as bytes: protobuf, but a chunk's payload is never copied into one of its messages."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.transfer.framing import bytes_tag, joined, payload_place, read_varint, varint
from serving.proto import millrace_pb2 as pb

PUSH = "/millrace.v1.Decode/Push"
_CHUNK_TAG = bytes_tag(pb.PushMessage.CHUNK_FIELD_NUMBER)
_PAYLOAD_TAG = bytes_tag(pb.Chunk.PAYLOAD_FIELD_NUMBER)


@dataclass(frozen=True, slots=True)
class Frame:
    """A message and, if it is a chunk that brings its bytes along, those bytes; `message` is without them."""

    message: pb.PushMessage
    payload: bytes | memoryview = b""


def to_wire(frame: Frame) -> bytes:
    if not frame.payload:
        return frame.message.SerializeToString()
    pieces = joined(frame.message.chunk.SerializeToString(), _PAYLOAD_TAG, frame.payload)
    return b"".join((bytes((_CHUNK_TAG,)), varint(sum(map(len, pieces))), *pieces))


def from_wire(data: bytes) -> Frame:
    """Raises google.protobuf.message.DecodeError on what is no message."""
    place = _payload(data)
    if place is not None:
        field, start, end = place
        _, first = read_varint(data, 1)
        chunk = pb.Chunk.FromString(data[first:field] + data[end:])
        if not chunk.payload:
            return Frame(pb.PushMessage(chunk=chunk), memoryview(data)[start:end])
    return framed(pb.PushMessage.FromString(data))


def framed(message: pb.PushMessage) -> Frame:
    """A message that the library has read: its payload is taken out."""
    if message.WhichOneof("part") != "chunk":
        return Frame(message)
    payload, message.chunk.payload = message.chunk.payload, b""
    return Frame(message, payload)


def _payload(data: bytes) -> tuple[int, int, int] | None:
    """Where a chunk's payload field begins, and its bytes begin and end; None in a message that has none, or is odd."""
    if not data or data[0] != _CHUNK_TAG:
        return None
    try:
        size, at = read_varint(data, 1)
    except IndexError:
        return None
    return payload_place(data, at, _PAYLOAD_TAG) if at + size == len(data) else None
