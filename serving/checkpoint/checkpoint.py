"""A checkpoint as named tensors read one at a time, so that loading never holds a second copy of the model.

Knows the file formats' tensors, not what they mean to a decoder.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor

from serving.checkpoint.safetensors_files import opened, tensor_files

Container = Literal["safetensors", "gguf"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAPPED_BYTES = 16 << 20  # of a file that stay mapped, and so count as the process's memory, while it is read
EIGHT_BITS = ("I8", "F8_E4M3")
PACKED = "U8"  # bytes that hold parts of numbers, or several
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Checkpoint(Protocol):
    """Named tensors in files."""

    @property
    def container(self) -> Container:
        """The file format, which decides how tensors are named."""

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold them, in a fixed order."""

    @property
    def int8_names(self) -> frozenset[str]:
        """The tensors stored as plain 8-bit integers or floats, whose scales are tensors of their own."""

    @property
    def float8(self) -> bool:
        """True if those are floats, e4m3."""

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that have been read as tensors so far, headers left out."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor as `read` returns it."""

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU as it is stored; where blocks are quantized, dequantized to float32."""

    def read_slice(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """These rows of the tensor, all columns or some, without the rest of it.

        Of a matrix in quantized blocks whole blocks are read, and cut when they are dequantized.
        """


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists, in a Hugging Face folder."""

    container: Final[Container] = "safetensors"

    def __init__(self, folder: Path) -> None:
        """Raises ValueError when the folder holds no safetensors, or a file is missing or damaged."""
        self._where = tensor_files(folder)
        self._versions = {file: _version(file) for file in self.files}
        self._open = {file: opened(file, "pt") for file in self.files}
        self._mapped: Counter[Path] = Counter()  # bytes read of a file since it was opened
        self.bytes_read = 0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(set(self._where.values())))

    @property
    def dtype(self) -> str:
        """The dtype most of the model is stored in, as its largest tensor has it."""
        wide = (name for name in self.names if self._slice(name).get_dtype() not in (*EIGHT_BITS, PACKED))
        largest = max(wide, key=lambda name: prod(self._slice(name).get_shape()))
        stored = self._slice(largest).get_dtype()
        if stored not in STORED_DTYPES:
            raise ValueError(
                f"{largest} is stored as {stored}, which is not supported; use a checkpoint in BF16, F16 or F32"
            )
        return STORED_DTYPES[stored]

    @property
    def int8_names(self) -> frozenset[str]:
        return frozenset(name for name in self._where if self._slice(name).get_dtype() in EIGHT_BITS)

    @property
    def float8(self) -> bool:
        return any(self._slice(name).get_dtype() == "F8_E4M3" for name in self._where)

    def _slice(self, name: str) -> Any:
        return self._open[self._where[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        return self._counted(name, self._open[self._where[name]].get_tensor(name))

    def read_slice(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        stored = self._slice(name)
        held = slice(rows.start, rows.stop)
        return self._counted(name, stored[held] if columns is None else stored[held, columns.start : columns.stop])

    def _counted(self, name: str, tensor: Tensor) -> Tensor:
        """Tensors lie in a map of their file. A new map in its place now and then lets go of pages that were read.

        A file that was replaced or removed meanwhile stays mapped: the rest of the model is read from the same one.
        """
        file = self._where[name]
        self.bytes_read += tensor.nbytes
        self._mapped[file] += tensor.nbytes
        if self._mapped[file] > MAPPED_BYTES:
            self._mapped[file] = 0
            self._map_anew(file)
        return tensor

    def _map_anew(self, file: Path) -> None:
        before = self._versions[file]
        if before is None or _version(file) != before:
            return
        mapped = opened(file, "pt")
        if _version(file) == before:  # nor was it replaced just now
            self._open[file] = mapped


def _version(file: Path) -> tuple[int, int, int, int] | None:
    """What is another where the file was replaced or written; None where it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
