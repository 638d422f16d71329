"""The header of a GGUF file: its metadata and where its tensors lie. It knows neither torch nor what the keys mean.

Parsed here and not by the `gguf` package, which takes seconds for a vocabulary of 50,000 strings.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Value types of versions 2 and 3 that have a fixed size, as struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """GGUF lists dimensions fastest first; `shape` is the usual order."""

    shape: tuple[int, ...]
    kind: int  # a value of `gguf.GGMLQuantizationType`
    offset: int  # bytes from the start of the data section


class GgufHeader:
    """`metadata` by key, `tensors` by name, and the whole file as the memory map `data`, tensors from `data_start`."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file is not GGUF of version 2 or 3, or its header is damaged or cut short."""
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            self._read()
        except struct.error as error:
            raise ValueError(f"{path} is truncated: its header goes past its last byte ({error})") from error

    def _read(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 are supported")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors = dict(self._tensor() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self.data_start = -(-self._at // alignment) * alignment  # bytes from the start of the file

    def _scalars(self, code: str, count: int) -> list[Any]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self._at)
        self._at += layout.size
        return list(values)

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _string(self) -> str:
        start = self._at + 8
        end = start + self._scalar("Q")
        if end > len(self.data):
            raise struct.error("in a string")
        self._at = end
        return self.data[start:end].decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                return self._scalars(_SCALARS[item], count)
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path} holds a metadata value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _tensor(self) -> tuple[str, TensorInfo]:
        name, dimensions = self._string(), self._scalar("I")
        shape = tuple(self._scalars("Q", dimensions))[::-1]
        return name, TensorInfo(shape, self._scalar("I"), self._scalar("Q"))
