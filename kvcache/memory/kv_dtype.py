"""Conversion of KV between dtypes, for handoffs between workers that store it differently.

INT8 is made by the formula the kernels store KV with, so it equals what the decode worker would compute. It works on
copies, and knows neither leases nor transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from serving.errors import StaleLease
from serving.kernels.int8 import quantize_rows
from serving.kvspec import ITEM_BYTES, SCALE, LayerKV, Plane

AS_STORED = ""  # the encoding of KV that travels as the receiver stores it
FLOATS = ("float32", "bfloat16", "float16")
ENCODINGS = (AS_STORED, *FLOATS, "int8")
_INT8_KIND = "_int8"


@dataclass(frozen=True, slots=True)
class Wire:
    """How KV travels to one receiver: the layers as they are sent, and the `encoding` that tells the receiver so."""

    encoding: str
    layers: tuple[LayerKV, ...]

    @property
    def token_bytes(self) -> int:
        return sum(layer.token_bytes for layer in self.layers)


def is_lossy(encoding: str) -> bool:
    """True if KV in this encoding loses bits that its receiver would have kept."""
    return encoding == "int8"  # to a receiver that keeps int8 it travels AS_STORED


def choose_wire(own: Sequence[LayerKV], theirs: Sequence[LayerKV], kv_wire: str) -> Wire:
    """How a worker that stores `own` sends to one that stores `theirs`, with the setting `--kv-wire`.

    `auto` sends the smaller of the two forms, so the receiver ends up with the same bits either way. Raises StaleLease
    when the one cannot become the other: nothing has been sent by then.
    """
    if len(own) != len(theirs) or not all(convertible(*pair) for pair in zip(own, theirs, strict=True)):
        raise StaleLease("KV of this worker cannot be laid out as the decode worker stores it", code="layout")
    if kv_wire == "int8":
        return _encoded(theirs, "int8")
    if tuple(own) != tuple(theirs):
        for dtype in ENCODINGS[1:]:
            wire = _encoded(theirs, dtype)
            if wire.layers == tuple(own) and wire.token_bytes < sum(layer.token_bytes for layer in theirs):
                return wire
    return Wire(AS_STORED, tuple(theirs))


def _encoded(theirs: Sequence[LayerKV], dtype: str) -> Wire:
    layers = tuple(stored_as(layer, dtype) for layer in theirs)
    return Wire(dtype if layers != tuple(theirs) else AS_STORED, layers)


@lru_cache(maxsize=256)
def stored_as(layer: LayerKV, dtype: str) -> LayerKV:
    """The layer with its numbers kept as `dtype`: a float type, int8 with scales beside it, or AS_STORED for no change.

    Planes that are neither floating point nor int8 with scales stay as they are.
    """
    values = _values(layer)
    if dtype == AS_STORED or all(plane.dtype == dtype for plane in values if _is_number(plane, layer)):
        return layer
    changed = [Plane(p.name, p.shape, dtype) if _is_number(p, layer) else p for p in values]
    kind = layer.kind.removesuffix(_INT8_KIND)
    if dtype != "int8":
        return LayerKV(kind, tuple(changed))
    scales = [Plane(p.name + SCALE, p.shape[:-1], "float32") for p in values if _is_number(p, layer)]
    return LayerKV(kind + _INT8_KIND, (*changed, *scales))


@lru_cache(maxsize=256)
def convertible(source: LayerKV, target: LayerKV) -> bool:
    """True if `converted` can make the target's planes of the source's."""
    if any(plane.dtype not in ITEM_BYTES for layer in (source, target) for plane in layer.planes):
        return False
    theirs = {plane.name: plane for plane in _values(target)}
    ours = {plane.name: plane for plane in _values(source)}
    return theirs.keys() == ours.keys() and all(
        plane.shape == ours[name].shape
        and _is_number(plane, target) == _is_number(ours[name], source)
        and (_is_number(plane, target) or plane == ours[name])
        for name, plane in theirs.items()
    )


def converted(parts: Sequence[Tensor], source: LayerKV, target: LayerKV) -> list[Tensor]:
    """A layer's planes, uint8 [tokens, token_bytes] each, as the target stores them; unchanged if it is equal.

    The two must be convertible. Float to int8 is as the kernels write KV (serving.kernels.int8.quantize_rows), int8 to
    float is value times scale in float32, float to float rounds to nearest, ties to even.
    """
    if source == target:
        return list(parts)
    assert convertible(source, target)
    given = {plane.name: _typed(part, plane) for plane, part in zip(source.planes, parts, strict=True)}
    made: dict[str, Tensor] = {}
    for plane in _values(target):
        values, scales = given[plane.name], given.get(plane.name + SCALE)
        kind: torch.dtype = getattr(torch, plane.dtype)
        if values.dtype == kind:
            made[plane.name] = values
        elif kind is torch.int8:
            made[plane.name], scales = quantize_rows(values)
        else:
            made[plane.name] = (values if scales is None else values.float() * scales[..., None]).to(kind)
        if scales is not None and kind is torch.int8:
            made[plane.name + SCALE] = scales
    return [_bytes(made[plane.name]) for plane in target.planes]


def _values(layer: LayerKV) -> list[Plane]:
    """The layer's planes without those that only scale another."""
    names = {plane.name for plane in layer.planes}
    return [plane for plane in layer.planes if plane.name.removesuffix(SCALE) not in names - {plane.name}]


def _is_number(plane: Plane, layer: LayerKV) -> bool:
    """True if the plane's values are numbers: floating point, or int8 with a scale for each row."""
    scale = Plane(plane.name + SCALE, plane.shape[:-1], "float32")
    return plane.shape != () and (plane.dtype in FLOATS or (plane.dtype == "int8" and scale in layer.planes))


def _typed(part: Tensor, plane: Plane) -> Tensor:
    """[tokens, *shape] of the plane's dtype."""
    kind: torch.dtype = getattr(torch, plane.dtype)
    if part.storage_offset() % kind.itemsize:
        part = part.clone()  # a view of another type must begin where that type may
    return part.view(kind).view(len(part), *plane.shape)


def _bytes(values: Tensor) -> Tensor:
    """uint8 [tokens, token_bytes]."""
    return values.contiguous().view(len(values), -1).view(torch.uint8)
