"""Shows a checkpoint whose tensors hold all experts of a layer as one that has a tensor for each expert and projection.

So gpt-oss is stored: `experts.gate_up_proj` [E, H, 2I] with gate and up in turn, `experts.down_proj` [E, I, H], biases
beside them; or in MXFP4, as `_blocks` and `_scales`. Knows names and bytes, not what they mean to a decoder.

Shapes: E experts, H hidden width, I width of an expert.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from torch import Tensor

from serving.checkpoint.checkpoint import Container, SafetensorsFolder
from serving.checkpoint.mxfp4 import GROUP, dequantized

_PROJECTION = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up|down)_proj(?P<leaf>|_bias|_blocks|_scales)")
_ROWS = {"gate_up": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}, "down": {"down_proj": slice(None)}}


class _Place(NamedTuple):
    """Where one expert's tensor lies: some rows of one expert's part of a tensor, as wide as `kind` says."""

    tensor: str  # without the ending of MXFP4
    expert: int
    rows: slice
    kind: str  # of what is stored: "weight" [in, out], "bias" [out] or "mxfp4" [out, in]


class FusedExperts:
    """`serving.checkpoint.checkpoint.Checkpoint` over a folder; tensors that are not of experts pass through."""

    container: Final[Container] = "safetensors"

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder
        self._places = {place: at for name in sorted(folder.names) for place, at in _places(name, folder).items()}
        self._others = frozenset(name for name in folder.names if _PROJECTION.fullmatch(name) is None)

    @property
    def names(self) -> frozenset[str]:
        return self._others | self._places.keys()

    @property
    def files(self) -> tuple[Path, ...]:
        return self._folder.files

    @property
    def int8_names(self) -> frozenset[str]:
        return self._folder.int8_names & self._others

    @property
    def float8(self) -> bool:
        return self._folder.float8

    @property
    def bytes_read(self) -> int:
        return self._folder.bytes_read

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self._folder.shape(name)
        stored = self._folder.shape(_stored(place))[1:]
        out = stored[0] if place.kind == "mxfp4" else stored[-1]
        count = len(range(out)[place.rows])
        if place.kind == "bias":
            return (count,)
        return (count, stored[1] * GROUP if place.kind == "mxfp4" else stored[0])

    def read(self, name: str) -> Tensor:
        if name not in self._places:
            return self._folder.read(name)
        return self.read_slice(name, range(self.shape(name)[0]))

    def read_slice(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        place = self._places.get(name)
        if place is None:
            return self._folder.read_slice(name, rows, columns)
        one, chosen = range(place.expert, place.expert + 1), slice(rows.start, rows.stop)
        if place.kind == "bias":
            return self._folder.read_slice(place.tensor, one)[0][place.rows][chosen]
        if place.kind == "weight":
            return self._folder.read_slice(place.tensor, one, columns)[0][:, place.rows][:, chosen].t()
        return self._read_mxfp4(place, one, rows, columns)

    def _read_mxfp4(self, place: _Place, one: range, rows: range, columns: range | None) -> Tensor:
        """float32; of the file, rows of gate and up are read together, and all inputs of a row."""
        step = place.rows.step or 1
        held = range(rows.start * step, rows.stop * step)
        stored = [self._folder.read_slice(f"{place.tensor}_{part}", one, held)[0] for part in ("blocks", "scales")]
        whole = dequantized(*(part[place.rows] for part in stored))
        return whole if columns is None else whole[:, columns.start : columns.stop]


def _places(name: str, folder: SafetensorsFolder) -> dict[str, _Place]:
    """What each expert has of a tensor, by the name it is shown under."""
    found = _PROJECTION.fullmatch(name)
    if found is None or found["leaf"] == "_scales":
        return {}
    kind = {"": "weight", "_bias": "bias", "_blocks": "mxfp4"}[found["leaf"]]
    leaf = "bias" if kind == "bias" else "weight"
    tensor = name.removesuffix("_blocks")
    return {
        f"{found['experts']}.{expert}.{projection}.{leaf}": _Place(tensor, expert, rows, kind)
        for projection, rows in _ROWS[found["projection"]].items()
        for expert in range(folder.shape(name)[0])
    }


def _stored(place: _Place) -> str:
    return f"{place.tensor}_blocks" if place.kind == "mxfp4" else place.tensor
