"""Reads the key-value metadata at the head of a GGUF file, without touching its tensors.

It exists so that a process that needs only the tokenizer (a router) starts in milliseconds; it knows nothing of
what the keys mean.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

Value = bool | int | float | str | list["Value"]

# Value types of the GGUF specification (version 2 and 3) that have a fixed size, as struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads little-endian values one after the other from a byte buffer."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalars(self, code: str, count: int) -> list[Value]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return list(values)

    def unsigned(self, code: str) -> int:
        (value,) = self.scalars(code, 1)
        assert isinstance(value, int)
        return value

    def string(self) -> str:
        length = self.unsigned("Q")
        end = self.at + length
        if end > len(self.data):
            raise struct.error("a string runs past the end of the file")
        text = self.data[self.at : end].decode("utf-8", errors="replace")
        self.at = end
        return text

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.unsigned("I"), self.unsigned("Q")
            if item in _SCALARS:
                return self.scalars(_SCALARS[item], count)
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"GGUF value type {kind} is not known")
        return self.scalars(_SCALARS[kind], 1)[0]


def read_gguf_metadata(path: Path) -> dict[str, Value]:
    """Every metadata key of the file with its value. Raises `ValueError` when it is no readable GGUF file."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            cursor.at = 4
            try:
                return _read_pairs(cursor)
            except struct.error as error:
                raise ValueError(f"{path} is truncated or damaged: {error}") from error


def _read_pairs(cursor: _Cursor) -> dict[str, Value]:
    version = cursor.unsigned("I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported")
    cursor.unsigned("Q")  # number of tensors
    count = cursor.unsigned("Q")
    pairs: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string()
        pairs[key] = cursor.value(cursor.unsigned("I"))
    return pairs
