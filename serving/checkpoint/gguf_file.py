"""A GGUF file: its metadata as a dict and its tensors, dequantized on reading.

The header is parsed here, since vocabularies of 50,000 strings take seconds otherwise; blocks are dequantized by the
`gguf` package. Knows nothing of models. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor's place: GGUF lists dimensions fastest first, `shape` is the usual order."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the data section


class GgufFile:
    """Metadata and tensors of one GGUF file; also a `checkpoint.Checkpoint`."""

    container: Final = "gguf"

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file is not GGUF, is cut short or split, or holds a tensor type we do not read."""
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._bytes, path)
        cursor.at = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3 are supported")
        tensors, pairs = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path} is one part of a split GGUF; merge the parts into one file first")
        self._entries = dict(cursor.entry() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-cursor.at // alignment) * alignment

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def int8_names(self) -> frozenset[str]:
        return frozenset()  # its quantized tensors carry their scales within

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        *rows, width = entry.shape
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[entry.kind]
        row_bytes = width // per_block * block_bytes
        start, size = self._data + entry.offset, prod(rows) * row_bytes
        if start + size > len(self._bytes):
            raise ValueError(f"{self.path} is cut short: tensor {name} ends past its last byte")
        # On a memory map of the file: pages are read as dequantizing walks over them.
        raw = np.frombuffer(self._bytes, dtype=np.uint8, count=size, offset=start).reshape(*rows, row_bytes)
        if entry.kind == gguf.GGMLQuantizationType.BF16:
            return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16).reshape(entry.shape)
        if entry.kind == gguf.GGMLQuantizationType.F16:
            return torch.from_numpy(raw.view(np.float16).copy()).reshape(entry.shape)
        if entry.kind == gguf.GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32).copy()).reshape(entry.shape)
        return torch.from_numpy(gguf.dequantize(raw, entry.kind)).reshape(entry.shape)


class _Cursor:
    """Reads GGUF's little-endian header values one after another."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError(f"{self.path} is cut short: its header goes past its last byte")
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = np.dtype(_SCALARS[item]).newbyteorder("<")
                return np.frombuffer(self.take(code.itemsize * count), dtype=code).tolist()
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path} holds a metadata value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def entry(self) -> tuple[str, _Entry]:
        name, dimensions = self.string(), self.scalar("I")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        known = {quantization.value: quantization for quantization in gguf.GGMLQuantizationType}
        if kind not in known or known[kind].name not in _READABLE:
            found = known[kind].name if kind in known else kind
            raise ValueError(f"tensor {name} of {self.path} is {found}; readable are {', '.join(_READABLE)}")
        return name, _Entry(shape, known[kind], offset)
