"""What one layer keeps per token in the KV cache, as data: GQA, MLA's latent and INT8 with scales are all planes.

The pool allocates by it, the codec cuts chunks by it, the fingerprint covers it. No torch here: dtypes are names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

AUTO = "auto"  # among KV dtypes: as the worker itself keeps KV
SCALE = "_scale"  # plane x of int8 has its scales in plane x_scale: one float32 for each row of x's last axis
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer's KV: `shape` elements of `dtype` for each token."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES

    @property
    def token_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The planes of one layer. The pool holds each as a tensor [num_blocks, block_size, *shape]."""

    kind: str
    planes: tuple[Plane, ...]

    @property
    def token_bytes(self) -> int:
        return sum(plane.token_bytes for plane in self.planes)

    @property
    def heads(self) -> int | None:
        """KV heads, which the first axis of every plane counts; None where planes have no such axis (MLA's latent)."""
        return self.planes[0].shape[0] if self.kind in ("gqa", "gqa_int8") else None


def gqa(kv_heads: int, head_dim: int, dtype: str) -> LayerKV:
    """Keys and values of `kv_heads` heads: planes k and v, each [kv_heads, head_dim] a token."""
    return LayerKV("gqa", (Plane("k", (kv_heads, head_dim), dtype), Plane("v", (kv_heads, head_dim), dtype)))


def gqa_int8(kv_heads: int, head_dim: int) -> LayerKV:
    """`gqa` in 8 bits: planes k and v, and a float32 scale for each head of each token in k_scale and v_scale."""
    return LayerKV(
        "gqa_int8",
        (
            *gqa(kv_heads, head_dim, "int8").planes,
            Plane("k_scale", (kv_heads,), "float32"),
            Plane("v_scale", (kv_heads,), "float32"),
        ),
    )


def mla(kv_rank: int, rope_dim: int, dtype: str) -> LayerKV:
    """MLA's latent and rotated key, which all heads share: planes c [kv_rank] and r [rope_dim] a token.

    In int8 each has a float32 scale a token, in c_scale and r_scale.
    """
    planes = (Plane("c", (kv_rank,), dtype), Plane("r", (rope_dim,), dtype))
    if dtype != "int8":
        return LayerKV("mla", planes)
    scales = tuple(Plane(plane.name + SCALE, (), "float32") for plane in planes)
    return LayerKV("mla_int8", (*planes, *scales))


def heads_of(kv_heads: int, rank: int, size: int) -> range:
    """The model's heads that rank `rank` of `size` holds: an even share, or one head, held by several ranks."""
    assert 0 <= rank < size and kv_heads > 0
    first = rank * kv_heads // size
    return range(first, first + 1) if kv_heads < size else range(first, (rank + 1) * kv_heads // size)


def with_heads(layer: LayerKV, count: int) -> LayerKV:
    """The layer with so many heads. One whose planes have no axis of heads must not be asked for."""
    assert layer.heads is not None
    return replace(layer, planes=tuple(replace(plane, shape=(count, *plane.shape[1:])) for plane in layer.planes))
