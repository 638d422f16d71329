"""A block as the pool keeps it: named by its content key, cut into parts, each with the digest its maker gave it.

The pool never looks inside. For KV a part is one layer's bytes of the block's tokens, planes after one another; for
weights a block has one part. No torch, no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from serving.errors import CorruptChunk
from serving.messages import owner_of, shown_tenant

KEY_BYTES = 32
DIGEST_BYTES = 16
DEFAULT_NAMESPACE = "default"

SlabPart = tuple[int, bytes, memoryview]
"""Which of the blocks asked for, the digest of its part, and the part's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockHeader:
    """A block but for its payload: `sizes` are its parts' bytes, `digests` 16 bytes for each, in order.

    `namespace` says whose quota the block counts against; the key alone says what it is.
    """

    key: bytes
    namespace: str
    sizes: tuple[int, ...]
    digests: bytes

    @property
    def parts(self) -> int:
        return len(self.sizes)

    def digest(self, index: int) -> bytes:
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def verify(self, first: int, last: int, data: bytes | memoryview) -> None:
        """Raises CorruptChunk unless `data` is parts first..last (exclusive), each as its maker wrote it."""
        sizes = self.sizes[first:last]
        if len(data) != sum(sizes):
            raise CorruptChunk("a block's parts do not add up to its bytes", code="length")
        for index, part in enumerate(cut(data, sizes), first):
            self.verify_part(index, part)

    def verify_part(self, index: int, data: bytes | memoryview) -> None:
        """Raises CorruptChunk unless `data` is this part as its maker wrote it."""
        if part_digest(self.key, index, len(self.sizes), data) != self.digest(index):
            raise CorruptChunk(f"part {index} of a block does not match its digest", code="digest")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolBlock(BlockHeader):
    """`payload` is the parts one after another."""

    payload: bytes | memoryview

    def part(self, index: int) -> memoryview:
        """The bytes of one part; no copy."""
        start = sum(self.sizes[:index])
        return memoryview(self.payload)[start : start + self.sizes[index]]


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

    @staticmethod
    def of(part: int, found: Sequence[SlabPart], via: str = "local") -> Slab:
        """A slab of these, as `parts` tells them, with a copy of their bytes."""
        indices, digests, parts = zip(*found, strict=True)
        sizes, payload = tuple(map(len, parts)), b"".join(parts)
        return Slab(part=part, indices=indices, sizes=sizes, digests=b"".join(digests), payload=payload, via=via)

    def parts(self) -> Iterator[SlabPart]:
        """What there is of each block; no copy."""
        starts = range(0, DIGEST_BYTES * len(self.indices), DIGEST_BYTES)
        digests = (self.digests[start : start + DIGEST_BYTES] for start in starts)
        return zip(self.indices, digests, cut(self.payload, self.sizes), strict=True)


def cut(payload: bytes | memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    """What lies one after another in the payload; no copy."""
    view, start = memoryview(payload), 0
    for size in sizes:
        yield view[start : start + size]
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
    digests = [part_digest(key, part, len(sizes), data) for part, data in enumerate(cut(payload, sizes))]
    return PoolBlock(key=key, namespace=namespace, sizes=tuple(sizes), digests=b"".join(digests), payload=payload)


def verify_block(block: PoolBlock) -> None:
    """Raises CorruptChunk unless the fields agree and every part is what its maker wrote for this key."""
    if len(block.key) != KEY_BYTES:
        raise CorruptChunk(f"a block's key has {len(block.key)} bytes instead of {KEY_BYTES}", code="key")
    if not block.sizes or any(size < 0 for size in block.sizes):
        raise CorruptChunk("a block has no parts, or one of less than no bytes", code="length")
    if len(block.digests) != DIGEST_BYTES * len(block.sizes):
        raise CorruptChunk("a block has not one digest for each part", code="digest")
    block.verify(0, block.parts, block.payload)


def namespace_of(tenant: str) -> str:
    """The name a tenant's blocks are counted under. The tenant may be a secret salt, so it does not appear in it.

    Where an owner is part of it, all of the owner's are counted together, whatever their salts.
    """
    return shown_tenant(owner_of(tenant) or tenant) or DEFAULT_NAMESPACE
