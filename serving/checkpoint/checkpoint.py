"""A checkpoint as named tensors read one at a time, so that loading never holds a second copy of the model.

Knows the file formats' tensors, not what they mean to a decoder.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serving.checkpoint.json_file import read_json

Container = Literal["safetensors", "gguf"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAPPED_BYTES = 16 << 20  # of a file that stay mapped, and so count as the process's memory, while it is read
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
        """The tensors stored as plain 8-bit integers, whose scales are tensors of their own."""

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
        self._where = _locate(folder)
        self._open = {file: _opened(file) for file in self.files}
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
        largest = max(self.names - self.int8_names, key=lambda name: prod(self._slice(name).get_shape()))
        stored = self._slice(largest).get_dtype()
        if stored not in STORED_DTYPES:
            raise ValueError(
                f"{largest} is stored as {stored}, which is not supported; use a checkpoint in BF16, F16 or F32"
            )
        return STORED_DTYPES[stored]

    @property
    def int8_names(self) -> frozenset[str]:
        return frozenset(name for name in self._where if self._slice(name).get_dtype() == "I8")

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
        """Tensors lie in a map of their file. A new map in its place now and then lets go of pages that were read."""
        file = self._where[name]
        self.bytes_read += tensor.nbytes
        self._mapped[file] += tensor.nbytes
        if self._mapped[file] > MAPPED_BYTES:
            self._open[file], self._mapped[file] = _opened(file), 0
        return tensor


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name → file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = read_json(index)["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        hint = ""
        if any(folder.glob("pytorch_model*.bin")):
            hint = "; its pytorch_model.bin is not read: save the model again with safe_serialization"
        raise ValueError(f"{folder} holds no model.safetensors{hint}")
    return dict.fromkeys(_opened(single).keys(), single)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ValueError(f"{file.parent} lists {file.name}, which is not there; download the model again") from None
    except SafetensorError as damage:
        raise ValueError(f"{file} is not a valid safetensors file ({damage}); download it again") from damage
