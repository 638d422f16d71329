"""A GGUF file as a checkpoint: its metadata as a dict and its tensors, dequantized on reading by the `gguf` package.

Knows nothing of models.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch
from torch import Tensor

from serving.gguf_header import GgufHeader

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

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header.tensors[name].shape

    def read(self, name: str) -> Tensor:
        header, tensor = self._header, self._header.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        *rows, width = tensor.shape
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = width // per_block * block_bytes
        start, size = header.data_start + tensor.offset, prod(rows) * row_bytes
        if start + size > len(header.data):
            raise ValueError(f"{self.path} is cut short: tensor {name} ends past its last byte")
        # On a memory map of the file: pages are read as dequantizing walks over them.
        raw = np.frombuffer(header.data, dtype=np.uint8, count=size, offset=start).reshape(*rows, row_bytes)
        if kind.name == "BF16":
            return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16).reshape(tensor.shape)
        values = raw.view(_PLAIN[kind.name]).copy() if kind.name in _PLAIN else gguf.dequantize(raw, kind)
        return torch.from_numpy(values).reshape(tensor.shape)
