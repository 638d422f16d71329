"""KV layouts the pool and the codec must take as they come: even ones, quantized ones, odd ones, unequal ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcache.memory.device import DeviceKV
from kvcache.memory.host_copy import Bytes
from serving.kvspec import LayerKV, Plane, gqa, gqa_int8

INT8 = LayerKV("int8", (Plane("k", (3,), "int8"), Plane("k_scale", (), "float32"), Plane("v", (2, 5), "int8")))
SCALE_LAST = LayerKV("int8", (Plane("k", (1,), "uint8"), Plane("scales", (1,), "float32")))
LATENT = LayerKV("mla", (Plane("latent", (7,), "bfloat16"), Plane("rope", (3,), "bfloat16")))

LAYOUTS: dict[str, tuple[LayerKV, ...]] = {
    "float32": (gqa(2, 4, "float32"),) * 3,
    "bfloat16": (gqa(1, 8, "bfloat16"),) * 2,
    "float16": (gqa(1, 3, "float16"),),
    "int8 and scales": (INT8, INT8),
    "one byte, then a scale": (SCALE_LAST, SCALE_LAST),
    "latent": (LATENT, LATENT),
    "unequal": (gqa(2, 4, "float32"), SCALE_LAST, LATENT, INT8, gqa(1, 2, "bfloat16")),
}


# Float KV, within whose blocks INT8 has room, and what has none.
WITH_ROOM = {
    "float32": (gqa(2, 4, "float32"),) * 2,
    "bfloat16": (gqa(1, 8, "bfloat16"), gqa(3, 64, "bfloat16")),
    "float16, no heads": (LayerKV("mla", (Plane("latent", (12,), "float16"), Plane("rope", (4,), "float16"))),),
    "floats of all kinds": (gqa(2, 4, "float32"), gqa(1, 8, "bfloat16"), gqa(5, 4, "float16")),
}
WITHOUT_ROOM = {
    "already int8": (gqa_int8(2, 8),),
    "one layer int8": (gqa(2, 8, "bfloat16"), gqa_int8(2, 8)),
    "scales would not be aligned": (gqa(2, 6, "bfloat16"),),
    "rows too short for a scale": (LayerKV("mla", (Plane("latent", (2,), "bfloat16"),)),),
    "no numbers": (LayerKV("opaque", (Plane("k", (8,), "uint8"),)),),
    "numbers and others": (LayerKV("opaque", (Plane("k", (8,), "float32"), Plane("tag", (8,), "uint8"))),),
}


def random_pool(specs: tuple[LayerKV, ...], num_blocks: int, block_size: int, seed: int) -> DeviceKV:
    """A pool of random bytes, NaNs and denormals among them: the codec has no opinion on values."""
    device_kv = DeviceKV(specs, num_blocks, block_size)
    generator = torch.Generator().manual_seed(seed)
    for planes in device_kv.planes:
        for plane in planes:
            raw = plane.view(-1).view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    return device_kv


def token_at(device_kv: DeviceKV, layer: int, blocks: list[int], position: int) -> bytes:
    """The bytes of one token in one layer, read the slow and obvious way."""
    block, offset = blocks[position // device_kv.block_size], position % device_kv.block_size
    return b"".join(
        plane[block, offset].flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        for plane in device_kv.planes[layer]
    )


def all_bytes(device_kv: DeviceKV) -> bytes:
    return b"".join(
        plane.reshape(-1).view(torch.uint8).numpy().tobytes() for planes in device_kv.planes for plane in planes
    )


def same_parts(found: Sequence[Tensor | Bytes], wanted: Sequence[Tensor | Bytes]) -> bool:
    """Whether two readings of a layer's planes are equal, bit for bit."""
    return all(np.array_equal(np.asarray(pair[0]), np.asarray(pair[1])) for pair in zip(found, wanted, strict=True))
