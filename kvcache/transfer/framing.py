"""Messages with a large payload as bytes: protobuf like any other, but the payload is never copied into a message.

The protobuf library would copy it twice on either side, which costs as much as the way through the sockets. So the
fields before and after it are the library's, and the payload goes between them as it is.
"""

from __future__ import annotations

_FIXED = {1: 8, 5: 4}  # bytes a value takes, by wire type


def bytes_tag(field: int) -> int:
    """The tag of a field that holds bytes or a message; below 16, so that it is one byte."""
    assert 0 < field < 16
    return field << 3 | 2


def joined(head: bytes, tag: int, payload: bytes | memoryview) -> list[bytes | memoryview]:
    """The pieces of a message: its other fields, serialized, and its payload under this tag."""
    return [head, bytes((tag,)), varint(len(payload)), payload]


def payload_place(data: bytes, at: int, tag: int) -> tuple[int, int, int] | None:
    """Where the payload's field begins, and its bytes begin and end, in a message that reaches from `at` to the end.

    None in a message that has none, or is odd.
    """
    try:
        while at < len(data):
            field = at
            found, at = read_varint(data, at)
            if found & 7 == 0:
                _, at = read_varint(data, at)
            elif found & 7 == 2:
                size, at = read_varint(data, at)
                if found == tag:
                    return (field, at, at + size) if at + size <= len(data) else None
                at += size
            else:
                at += _FIXED[found & 7]
    except (IndexError, KeyError):
        return None
    return None


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises IndexError."""
    value = shift = 0
    while data[at] > 0x7F:
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
