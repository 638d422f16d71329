"""Protobuf messages with one large bytes field, which is never copied into a message: one codec for all of them.

The protobuf library would copy the payload twice on either side, which costs as much as the sockets do. So it encodes
the other fields, and the payload is put after them, or cut out from between them, here. It knows no message by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

MOST_SHIFT = 56  # of a varint's next to last byte: 64 bits are ten bytes
_FIXED = {1: 8, 5: 4}  # bytes a value takes, by wire type

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Frame(Generic[M]):
    """A message without its payload, and the payload: in any number of parts when sent, in one part when received."""

    message: M
    parts: Sequence[bytes | memoryview] = ()

    @property
    def payload(self) -> bytes | memoryview:
        """The payload of a frame that was received; empty if it brought none."""
        return self.parts[0] if self.parts else b""


class Framing(Generic[M]):
    """How messages of type `kind` travel. `path` names the fields that lead to the payload, such as chunk, payload.

    A message that the payload's message is nested in holds nothing beside it when there is a payload. Encoded frames
    are valid protobuf, and what the library encodes is decoded here.
    """

    def __init__(self, kind: type[M], *path: str):
        self._kind = kind
        self._path = path
        descriptor: Any = kind.DESCRIPTOR
        tags = []
        for name in path:
            field = descriptor.fields_by_name[name]
            assert field.number < 16, "a payload's tag is one byte"
            tags.append(bytes((field.number << 3 | 2,)))
            descriptor = field.message_type
        *self._outer, self._tag = tags

    def encode(self, frame: Frame[M]) -> bytes:
        if not frame.parts:
            return frame.message.SerializeToString()
        size = sum(map(len, frame.parts))
        parts = [self._owner(frame.message).SerializeToString(), self._tag, varint(size), *frame.parts]
        for tag in reversed(self._outer):
            parts = [tag, varint(sum(map(len, parts))), *parts]
        return b"".join(parts)

    def decode(self, data: bytes) -> Frame[M]:
        """Raises google.protobuf.message.DecodeError if `data` is no message of this type."""
        span = self._payload_span(data)
        if span is not None:
            first, field, start, end = span
            rest = data[first:field] + data[end:]
            for tag in reversed(self._outer):
                rest = tag + varint(len(rest)) + rest
            message = self._kind.FromString(rest)
            if not self._owner(message).payload:
                return Frame(message, (memoryview(data)[start:end],) if start < end else ())
        return self._decode_copying(data)  # a payload field given twice, or none: as the library reads it

    def _decode_copying(self, data: bytes) -> Frame[M]:
        message = self._kind.FromString(data)
        owner = self._owner(message) if all(message.HasField(name) for name in self._path[:-1]) else None
        if owner is None or not owner.payload:
            return Frame(message)
        payload, owner.payload = owner.payload, b""
        return Frame(message, (payload,))

    def _owner(self, message: M) -> Any:
        """The message that has the payload field."""
        owner: Any = message
        for name in self._path[:-1]:
            owner = getattr(owner, name)
        return owner

    def _payload_span(self, data: bytes) -> tuple[int, int, int, int] | None:
        """Where the payload's message and its payload field begin, and where the payload's bytes begin and end.

        None if there is no such field, or the message is not laid out as `encode` does it.
        """
        first = 0
        try:
            for tag in self._outer:
                if data[first : first + 1] != tag:
                    return None
                size, first = read_varint(data, first + 1)
                if first + size != len(data):
                    return None
            at = first
            while at < len(data):
                field = at
                found, at = read_varint(data, at)
                if found & 7 == 0:
                    _, at = read_varint(data, at)
                elif found & 7 == 2:
                    size, at = read_varint(data, at)
                    if found == self._tag[0]:
                        return (first, field, at, at + size) if at + size <= len(data) else None
                    at += size
                else:
                    at += _FIXED[found & 7]
        except (IndexError, KeyError):
            return None
        return None


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises IndexError, also for one of more than 64 bits."""
    value = shift = 0
    while data[at] > 0x7F:
        if shift > MOST_SHIFT:
            raise IndexError("a varint of more than ten bytes")
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


def varint(value: int) -> bytes:
    """https://protobuf.dev/programming-guides/encoding/#varints"""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
