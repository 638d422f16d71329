"""The KV chunk: some layers of a token range of a lease, as bytes with a fence and a digest, and its codec.

A chunk covers tokens, not blocks, so ends with unequal block sizes understand each other. The digest covers the
header's fields as well as the bytes: a chunk that is whole but in the wrong place is as corrupt as a flipped bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvcache.device import DevicePool
from serving.errors import CorruptChunk
from serving.messages import LeaseId


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Layers first_layer..last_layer (exclusive) of tokens start..end (exclusive) of the lease's sequence.

    Payload: layer by layer, plane by plane, token by token. `layout` is the fingerprint of model and KV layout.
    """

    lease: LeaseId
    layout: str
    first_layer: int
    last_layer: int
    start: int
    end: int
    payload: bytes | memoryview
    digest: bytes

    def header(self) -> bytes:
        """The fields the digest binds the payload to, in one unambiguous string."""
        lease = self.lease
        numbers = (lease.epoch, self.first_layer, self.last_layer, self.start, self.end, len(self.payload))
        return "\0".join([lease.lease, lease.instance, self.layout, *map(str, numbers)]).encode()


def digest(header: bytes, payload: bytes | memoryview) -> bytes:
    """XXH3-128 of header and payload: 16 bytes."""
    state = xxhash.xxh3_128(header)
    state.update(payload)
    return state.digest()


def encode(
    pool: DevicePool, lease: LeaseId, layout: str, layers: range, blocks: Sequence[int], start: int, end: int
) -> Chunk:
    """Read the chunk's bytes out of the pool."""
    slots = pool.slots(blocks, start, end)
    parts = [part.flatten() for layer in layers for part in pool.read(layer, slots)]
    payload = torch.cat(parts).numpy().data.cast("B")
    bare = Chunk(
        lease=lease,
        layout=layout,
        first_layer=layers.start,
        last_layer=layers.stop,
        start=start,
        end=end,
        payload=payload,
        digest=b"",
    )
    return sealed(bare)


def sealed(chunk: Chunk) -> Chunk:
    """The chunk with its digest computed."""
    return Chunk(
        lease=chunk.lease,
        layout=chunk.layout,
        first_layer=chunk.first_layer,
        last_layer=chunk.last_layer,
        start=chunk.start,
        end=chunk.end,
        payload=chunk.payload,
        digest=digest(chunk.header(), chunk.payload),
    )


def verify(chunk: Chunk, pool: DevicePool) -> None:
    """Raises CorruptChunk unless digest, shape and length all fit."""
    if digest(chunk.header(), chunk.payload) != chunk.digest:
        raise CorruptChunk("the digest of a KV chunk does not match its bytes", code="digest")
    if not (0 <= chunk.first_layer < chunk.last_layer <= len(pool.specs) and 0 <= chunk.start < chunk.end):
        raise CorruptChunk("a KV chunk names layers or tokens that do not exist", code="range")
    tokens = chunk.end - chunk.start
    expected = tokens * sum(spec.token_bytes for spec in pool.specs[chunk.first_layer : chunk.last_layer])
    if len(chunk.payload) != expected:
        raise CorruptChunk(f"a KV chunk has {len(chunk.payload)} bytes instead of {expected}", code="length")


def split(chunk: Chunk, pool: DevicePool) -> list[list[Tensor]]:
    """The payload of a verified chunk per layer and plane: uint8 [tokens, token_bytes], views where possible."""
    tokens = chunk.end - chunk.start
    data = torch.from_numpy(np.frombuffer(chunk.payload, dtype=np.uint8).copy())
    layers, offset = [], 0
    for spec in pool.specs[chunk.first_layer : chunk.last_layer]:
        parts = []
        for plane in spec.planes:
            size = tokens * plane.token_bytes
            parts.append(data[offset : offset + size].view(tokens, plane.token_bytes))
            offset += size
        layers.append(parts)
    return layers
