"""Messages of the `Push` stream as bytes: protobuf like any other, but a chunk's payload is never copied into one.

The protobuf library would copy it twice on either side, which costs as much as the way through the sockets. So the
fields before and after it are the library's, and the payload goes between them as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.proto import millrace_pb2 as pb

PUSH = "/millrace.v1.Decode/Push"
_CHUNK_TAG = pb.PushMessage.CHUNK_FIELD_NUMBER << 3 | 2
_PAYLOAD_TAG = pb.Chunk.PAYLOAD_FIELD_NUMBER << 3 | 2
_FIXED = {1: 8, 5: 4}  # bytes a value takes, by wire type


@dataclass(frozen=True, slots=True)
class Frame:
    """A message and, if it is a chunk that brings its bytes along, those bytes; `message` is without them."""

    message: pb.PushMessage
    payload: bytes | memoryview = b""


def to_wire(frame: Frame) -> bytes:
    if not frame.payload:
        return frame.message.SerializeToString()
    head = frame.message.chunk.SerializeToString()
    payload_head = bytes((_PAYLOAD_TAG,)) + _varint(len(frame.payload))
    size = len(head) + len(payload_head) + len(frame.payload)
    return b"".join((bytes((_CHUNK_TAG,)), _varint(size), head, payload_head, frame.payload))


def from_wire(data: bytes) -> Frame:
    """Raises google.protobuf.message.DecodeError on what is no message."""
    place = _payload(data)
    if place is not None:
        field, start, end = place
        _, first = _read_varint(data, 1)
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
    try:
        if data[0] != _CHUNK_TAG:
            return None
        size, at = _read_varint(data, 1)
        if at + size != len(data):
            return None
        while at < len(data):
            field = at
            tag, at = _read_varint(data, at)
            if tag & 7 == 0:
                _, at = _read_varint(data, at)
            elif tag & 7 == 2:
                size, at = _read_varint(data, at)
                if tag == _PAYLOAD_TAG:
                    return (field, at, at + size) if at + size <= len(data) else None
                at += size
            else:
                at += _FIXED[tag & 7]
    except (IndexError, KeyError):
        return None
    return None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises IndexError."""
    value = shift = 0
    while data[at] > 0x7F:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


def _varint(value: int) -> bytes:
    """https://protobuf.dev/programming-guides/encoding/#varints"""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
