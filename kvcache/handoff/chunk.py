"""The KV chunk: some layers of a token range of a lease, as bytes with a fence and a digest, and its codec.

A chunk covers tokens, not blocks, and says how its numbers are encoded and which heads it brings, so that unequal ends
understand each other. The digest covers the header's fields as well as the bytes: a chunk that is whole but in the
wrong place is as corrupt as a flipped bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvcache.handoff.tree_digest import leaves_of, root_of
from kvcache.memory.device import DeviceKV
from kvcache.memory.device_room import DevicePayload, DeviceRoom
from kvcache.memory.heads import HeadSlice
from kvcache.memory.host_copy import Bytes
from kvcache.memory.kv_dtype import AS_STORED, ENCODINGS, Wire, converted, stored_as
from kvcache.memory.token_slots import TokenSlots
from kvcache.transfer.payload import Payload
from serving.errors import CorruptChunk
from serving.kvspec import LayerKV, with_heads
from serving.messages import LeaseId

LONGEST_WAIT = 60.0  # seconds that a first token may have waited for the rest of its handoff


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Layers first_layer..last_layer (exclusive) of tokens start..end (exclusive) of the lease's sequence.

    Payload: layer by layer, plane by plane, token by token. `layout` is the fingerprint of the receiver's model and KV
    layout; `encoding`, one of kvcache.memory.kv_dtype.ENCODINGS, is the dtype the numbers travel as. Heads
    first_head..last_head (exclusive) are counted as the receiver counts its own; 0 and 0 are all of them.
    """

    lease: LeaseId
    layout: str
    encoding: str = AS_STORED
    first_layer: int
    last_layer: int
    first_head: int = 0
    last_head: int = 0
    start: int
    end: int
    payload: Payload
    digest: bytes

    @property
    def whole(self) -> bool:
        """It brings all heads."""
        return self.first_head == self.last_head == 0

    def header(self) -> bytes:
        """The fields the digest binds the payload to, in one unambiguous string."""
        texts = (self.lease.lease, self.lease.instance, self.layout, self.encoding)
        layers, heads = (self.first_layer, self.last_layer), (self.first_head, self.last_head)
        numbers = (self.lease.epoch, *layers, *heads, self.start, self.end, len(self.payload), *map(len, texts))
        return "\0".join([*map(str, numbers), *texts]).encode()


def digest(header: bytes, payload: Payload) -> bytes:
    """That of header and payload (kvcache.handoff.tree_digest): 16 bytes."""
    return root_of(header, payload.leaves if isinstance(payload, DevicePayload) else leaves_of(_on_host(payload)))


def encode(
    device_kv: DeviceKV,
    lease: LeaseId,
    layout: str,
    layers: range,
    blocks: Sequence[int],
    start: int,
    end: int,
    *,
    wire: Wire | None = None,
    head_slice: HeadSlice | None = None,
    first_layer: int | None = None,
    room: DeviceRoom | None = None,
) -> Chunk:
    """Read the chunk's bytes out of the KV cache; `wire` says how they travel, `head_slice` which heads go.

    With `room` they stay on the device where they can: as they are stored there, and all of them.

    By default KV goes as it is stored here, with all its heads. Layers of one chunk that is cut must all have heads.
    `first_layer` is what the receiver calls the first of `layers`, where it has other layers than this worker.
    """
    slots, wire = device_kv.slots(blocks, start, end), wire or Wire(AS_STORED, device_kv.specs)
    asked = slice(layers.start, layers.stop)
    payload: Payload
    leaves: bytes | None = None
    if head_slice is None and wire.layers[asked] == device_kv.specs[asked]:
        payload, leaves = _read(device_kv, layers, slots, room)
    else:
        read = zip(layers, device_kv.read_all(layers, slots), strict=True)
        layouts = (_laid_out(planes, device_kv.specs[layer], wire.layers[layer], head_slice) for layer, planes in read)
        payload = torch.cat([part.flatten() for layer in layouts for part in layer]).numpy().data.cast("B")
    heads = range(0) if head_slice is None or head_slice.whole else head_slice.place
    assert not heads or all(device_kv.specs[layer].heads is not None for layer in layers)
    place = layers.start if first_layer is None else first_layer
    bare = Chunk(
        lease=lease,
        layout=layout,
        encoding=wire.encoding,
        first_layer=place,
        last_layer=place + len(layers),
        first_head=heads.start,
        last_head=heads.stop,
        start=start,
        end=end,
        payload=payload,
        digest=b"",
    )
    return sealed(bare, leaves)


def _read(
    device_kv: DeviceKV, layers: range, slots: TokenSlots, room: DeviceRoom | None
) -> tuple[Payload, bytes | None]:
    """The layers' planes one after another, in one pass; and the digests of leaves if they were computed there."""
    packed = None if room is None else device_kv.pack(layers, slots, room)
    if packed is not None:
        return packed, packed.leaves
    size = slots.tokens * sum(device_kv.specs[layer].token_bytes for layer in layers)
    payload = np.empty(size, dtype=np.uint8)
    leaves = device_kv.read_into(layers, slots, payload)
    return payload.data.cast("B"), leaves


def _laid_out(planes: Sequence[Tensor], source: LayerKV, target: LayerKV, head_slice: HeadSlice | None) -> list[Tensor]:
    """A layer's planes as they are to travel: uint8 [tokens, token_bytes]."""
    if head_slice is not None and source.heads is not None:
        planes, source = _cut(planes, source, head_slice.heads)
    return converted(planes, source, target if source.heads is None else with_heads(target, source.heads))


def _cut(planes: Sequence[Tensor], spec: LayerKV, heads: range) -> tuple[list[Tensor], LayerKV]:
    """Only these heads of each plane, uint8 [tokens, token_bytes], and the layer they make."""
    assert spec.heads is not None
    rows = [plane.view(len(plane), spec.heads, -1)[:, heads.start : heads.stop].flatten(1) for plane in planes]
    return rows, with_heads(spec, len(heads))


def sealed(chunk: Chunk, leaves: bytes | None = None) -> Chunk:
    """The chunk with its digest computed; `leaves` are those of its payload, if they are known."""
    if leaves is None:
        return replace(chunk, digest=digest(chunk.header(), chunk.payload))
    return replace(chunk, digest=root_of(chunk.header(), leaves))


def verify(chunk: Chunk, device_kv: DeviceKV) -> None:
    """Raises CorruptChunk unless digest, shape and length all fit and it brings every head."""
    check(chunk, device_kv.specs)
    if not chunk.whole:
        raise CorruptChunk("a KV chunk brings some of the heads where all are due", code="heads")


def check(chunk: Chunk, specs: Sequence[LayerKV]) -> None:
    """Raises CorruptChunk unless digest, shape and length all fit a receiver that stores `specs`."""
    if digest(chunk.header(), chunk.payload) != chunk.digest:
        raise CorruptChunk("the digest of a KV chunk does not match its bytes", code="digest")
    if not (0 <= chunk.first_layer < chunk.last_layer <= len(specs) and 0 <= chunk.start < chunk.end):
        raise CorruptChunk("a KV chunk names layers or tokens that do not exist", code="range")
    expected = (chunk.end - chunk.start) * sum(layer.token_bytes for layer in wire_layers(chunk, specs))
    if len(chunk.payload) != expected:
        raise CorruptChunk(f"a KV chunk has {len(chunk.payload)} bytes instead of {expected}", code="length")


def wire_layers(chunk: Chunk, specs: Sequence[LayerKV]) -> list[LayerKV]:
    """How the chunk's layers lie in its payload, for a receiver that stores `specs`. Raises CorruptChunk."""
    if chunk.encoding not in ENCODINGS:
        raise CorruptChunk(f"a KV chunk is encoded as {chunk.encoding!r}, which is unknown", code="encoding")
    layers = [stored_as(spec, chunk.encoding) for spec in specs[chunk.first_layer : chunk.last_layer]]
    if chunk.whole:
        return layers
    if not all(0 <= chunk.first_head < chunk.last_head <= (layer.heads or 0) for layer in layers):
        raise CorruptChunk("a KV chunk names heads that do not exist", code="heads")
    return [with_heads(layer, chunk.last_head - chunk.first_head) for layer in layers]


def packed(chunk: Chunk, specs: Sequence[LayerKV]) -> DevicePayload | None:
    """The payload of a verified chunk that lies on a device, as the receiver, which stores `specs`, has it there."""
    stored = list(specs[chunk.first_layer : chunk.last_layer])
    as_stored = chunk.whole and wire_layers(chunk, specs) == stored
    return chunk.payload if isinstance(chunk.payload, DevicePayload) and as_stored else None


def split(chunk: Chunk, device_kv: DeviceKV) -> list[list[Bytes]]:
    """The payload of a verified chunk per layer and plane, as the device stores them: uint8 [tokens, token_bytes].

    Views of the payload where it travelled as it is stored.
    """
    layers, stored = wire_layers(chunk, device_kv.specs), device_kv.specs[chunk.first_layer : chunk.last_layer]
    found = []
    for parts, source, target in zip(_planes(chunk, layers), layers, stored, strict=True):
        if source != target:
            writable = [torch.from_numpy(part if part.flags.writeable else part.copy()) for part in parts]
            parts = [part.numpy() for part in converted(writable, source, target)]
        found.append(parts)
    return found


def _planes(chunk: Chunk, layers: Sequence[LayerKV]) -> list[list[Bytes]]:
    """The payload per layer and plane: uint8 [tokens, token_bytes], views of it."""
    tokens = chunk.end - chunk.start
    data = np.frombuffer(_on_host(chunk.payload), dtype=np.uint8)
    found, offset = [], 0
    for layer in layers:
        parts: list[Bytes] = []
        for plane in layer.planes:
            size = tokens * plane.token_bytes
            parts.append(data[offset : offset + size].reshape(tokens, plane.token_bytes))
            offset += size
        found.append(parts)
    return found


def _on_host(payload: Payload) -> bytes | memoryview:
    """It may wait for a device: not on the event loop."""
    return payload if isinstance(payload, bytes | memoryview) else payload.to_host()


def join(chunks: Sequence[Chunk], specs: Sequence[LayerKV]) -> Chunk:
    """One whole chunk out of those that several ranks sent for the same layers and tokens, each with some heads.

    Raises CorruptChunk when one of them is, or when together they are not every head once.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.first_head)
    for chunk in ordered:
        check(chunk, specs)
    first, layers = ordered[0], specs[ordered[0].first_layer : ordered[0].last_layer]
    if len(ordered) == 1 and first.whole:
        return first
    borders = [0, *(chunk.last_head for chunk in ordered)]
    starts = [*(chunk.first_head for chunk in ordered), *{layer.heads for layer in layers}]
    if borders != starts or any(_place(chunk) != _place(first) for chunk in ordered):
        raise CorruptChunk("the parts of a KV chunk do not bring every head once", code="heads")
    cut = [_planes(chunk, wire_layers(chunk, specs)) for chunk in ordered]
    parts = []
    for index, layer in enumerate(layers):
        planes = range(len(stored_as(layer, first.encoding).planes))
        parts += [np.concatenate([one[index][plane] for one in cut], axis=1).reshape(-1) for plane in planes]
    payload = np.concatenate(parts).data.cast("B")
    return sealed(replace(first, first_head=0, last_head=0, payload=payload))


def _place(chunk: Chunk) -> Chunk:
    """The fields that must be equal in all chunks that are joined."""
    return replace(chunk, first_head=0, last_head=0, payload=b"", digest=b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """All KV of the lease has been sent, and `first_token` follows the tokens it covers. `digest`: 16 bytes.

    `waited` are the seconds since that token was drawn, as the sender knows them: a hint that the digest leaves out.
    """

    lease: LeaseId
    first_token: int
    digest: bytes
    waited: float = 0.0

    @property
    def age(self) -> float:
        """What of `waited` can be believed: no handoff takes longer, or less than nothing."""
        return min(LONGEST_WAIT, max(0.0, self.waited))

    def header(self) -> bytes:
        """The fields the digest covers, in one unambiguous string, which is no chunk's."""
        texts = (self.lease.lease, self.lease.instance)
        numbers = (self.lease.epoch, self.first_token, *map(len, texts))
        return "\0".join(["commit", *map(str, numbers), *texts]).encode()


def sealed_commit(lease: LeaseId, first_token: int, waited: float = 0.0) -> Commit:
    """The commit with its digest computed: XXH3-128."""
    bare = Commit(lease=lease, first_token=first_token, digest=b"", waited=waited)
    return replace(bare, digest=digest(bare.header(), b""))


def verify_commit(commit: Commit) -> None:
    """Raises CorruptChunk unless the digest is that of the fields."""
    if commit.digest != digest(commit.header(), b""):
        raise CorruptChunk("the commit of a handoff does not match its digest", code="digest")
