"""A block as the pool keeps it: named by its content key, cut into parts, each with the digest its maker gave it.

The pool never looks inside. For KV a part is one layer's bytes of the block's tokens, planes after one another; for
weights a block has one part. No torch, no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import xxhash

from serving.errors import CorruptChunk

KEY_BYTES = 32
DIGEST_BYTES = 16
DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolBlock:
    """`payload` is the parts one after another, `sizes` their bytes, `digests` 16 bytes for each, in order.

    `namespace` says whose quota the block counts against; the key alone says what it is.
    """

    key: bytes
    namespace: str
    sizes: tuple[int, ...]
    digests: bytes
    payload: bytes | memoryview

    @property
    def parts(self) -> int:
        return len(self.sizes)

    def part(self, index: int) -> memoryview:
        """The bytes of one part; no copy."""
        start = sum(self.sizes[:index])
        return memoryview(self.payload)[start : start + self.sizes[index]]

    def digest(self, index: int) -> bytes:
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slab:
    """One part of some of the blocks that were asked for: what a node sends, about two megabytes at a time.

    `indices` are positions in the list of keys asked for, ascending; `sizes` and `digests` go with them one by one.
    `via` is the transport it came by, for the accounts.
    """

    part: int
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    digests: bytes
    payload: bytes | memoryview
    via: str = "local"

    def parts(self) -> Iterator[tuple[int, bytes, memoryview]]:
        """(index, digest, bytes) of each."""
        start = 0
        view = memoryview(self.payload)
        for i, (index, size) in enumerate(zip(self.indices, self.sizes, strict=True)):
            yield index, self.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES], view[start : start + size]
            start += size


def part_digest(key: bytes, part: int, parts: int, data: bytes | memoryview) -> bytes:
    """XXH3-128 over where a part belongs and its bytes: 16 bytes. A misplaced part does not match either."""
    state = xxhash.xxh3_128(key + struct.pack("<III", part, parts, len(data)))
    state.update(data)
    return state.digest()


def make_block(key: bytes, namespace: str, parts: list[bytes | memoryview]) -> PoolBlock:
    """A block of these parts with their digests computed."""
    return block_of(key, namespace, [len(part) for part in parts], b"".join(parts))


def block_of(key: bytes, namespace: str, sizes: Sequence[int], payload: bytes | memoryview) -> PoolBlock:
    """A block whose parts, of these sizes, lie one after another in `payload`, with their digests computed."""
    view, start, digests = memoryview(payload), 0, []
    for part, size in enumerate(sizes):
        digests.append(part_digest(key, part, len(sizes), view[start : start + size]))
        start += size
    return PoolBlock(key=key, namespace=namespace, sizes=tuple(sizes), digests=b"".join(digests), payload=payload)


def check_shape(block: PoolBlock) -> None:
    """Raises CorruptChunk when the fields contradict one another, for use before slicing by them."""
    if len(block.key) != KEY_BYTES:
        raise CorruptChunk(f"a block's key has {len(block.key)} bytes instead of {KEY_BYTES}", code="key")
    if not block.sizes or any(size < 0 for size in block.sizes) or sum(block.sizes) != len(block.payload):
        raise CorruptChunk("a block's parts do not add up to its bytes", code="length")
    if len(block.digests) != DIGEST_BYTES * len(block.sizes):
        raise CorruptChunk("a block has not one digest for each part", code="digest")


def verify_block(block: PoolBlock) -> None:
    """Raises CorruptChunk unless every part is what its maker wrote for this key."""
    check_shape(block)
    start = 0
    view = memoryview(block.payload)
    for i, size in enumerate(block.sizes):
        if part_digest(block.key, i, block.parts, view[start : start + size]) != block.digest(i):
            raise CorruptChunk(f"part {i} of a pool block does not match its digest", code="digest")
        start += size


def namespace_of(tenant: str) -> str:
    """The name a tenant's blocks are counted under. The tenant may be a secret salt, so it does not appear in it."""
    return sha256(b"millrace-namespace\0" + tenant.encode()).hexdigest()[:16] if tenant else DEFAULT_NAMESPACE
