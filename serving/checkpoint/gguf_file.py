"""A GGUF file as a checkpoint: its metadata as a dict and its tensors, dequantized on reading by the `gguf` package.

Knows nothing of models.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from serving.gguf_header import GgufHeader

if TYPE_CHECKING:
    from torch import Tensor

_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_PLAIN = {"F32": np.float32, "F16": np.float16}


class GgufFile:
    """Metadata and tensors of one GGUF file; also a `checkpoint.Checkpoint`."""

    container: Final = "gguf"

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file is not GGUF, is cut short or split, or holds a tensor type we do not read."""
        self.path = path
        self._header = GgufHeader(path)
        self.metadata = self._header.metadata
        self.bytes_read = 0
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path} is one part of a split GGUF; merge the parts into one file first")
        known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        for name, tensor in self._header.tensors.items():
            found = known.get(tensor.kind, tensor.kind)
            if found not in _READABLE:
                raise ValueError(f"tensor {name} of {path} is {found}; readable are {', '.join(_READABLE)}")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._header.tensors)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def int8_names(self) -> frozenset[str]:
        return frozenset()  # its quantized tensors carry their scales within

    @property
    def float8(self) -> bool:
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensors[name].shape

    def read(self, name: str) -> Tensor:
        kind, raw = self._raw(name)
        values = self._values(raw, kind).reshape(self.shape(name))
        if hasattr(mmap, "MADV_DONTNEED"):
            self._header.data.madvise(mmap.MADV_DONTNEED)  # pages that were read would count as ours until the end
        return values

    def read_slice(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        kind, raw = self._raw(name)
        if raw.ndim == 1:  # a vector is one row of blocks
            return self._within(raw, kind, rows)
        held = raw[rows.start : rows.stop]
        return self._values(held, kind) if columns is None else self._within(held, kind, columns)

    def _within(self, raw: NDArray[np.uint8], kind: gguf.GGMLQuantizationType, columns: range) -> Tensor:
        """These columns of rows of blocks: of the blocks that hold them."""
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        first, end = columns.start // per_block, -(-columns.stop // per_block)
        values = self._values(raw[..., first * block_bytes : end * block_bytes], kind)
        return values[..., columns.start - first * per_block : columns.stop - first * per_block]

    def _raw(self, name: str) -> tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]:
        """The tensor's type and its bytes, a row of blocks a row, on a memory map of the file: no page is read yet."""
        header, tensor = self._header, self._header.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        *rows, width = tensor.shape
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = width // per_block * block_bytes
        start, size = header.data_start + tensor.offset, prod(rows) * row_bytes
        if start + size > len(header.data):
            raise ValueError(f"{self.path} is cut short: tensor {name} ends past its last byte")
        return kind, np.frombuffer(header.data, dtype=np.uint8, count=size, offset=start).reshape(*rows, row_bytes)

    def _values(self, raw: NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> Tensor:
        """The numbers in rows of blocks. Pages of the file are read as this walks over them."""
        import torch  # whoever reads values has it; a router reads the metadata alone

        self.bytes_read += raw.nbytes
        if kind.name == "BF16":
            return torch.from_numpy(np.ascontiguousarray(raw).view(np.int16).copy()).view(torch.bfloat16)
        if kind.name in _PLAIN:
            return torch.from_numpy(np.ascontiguousarray(raw).view(_PLAIN[kind.name]).copy())
        return torch.from_numpy(gguf.dequantize(np.ascontiguousarray(raw), kind))
