"""The format of a block's file: a header with a checksum of its own, then the parts one after another.

    magic  version  namespace's length  parts  payload's length  key | namespace | sizes | digests | checksum | payload

Little-endian. The checksum covers all bytes before it, the digests cover the payload. Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvcache.pool.block import DIGEST_BYTES, BlockHeader, PoolBlock, part_digest
from serving.errors import CorruptChunk

FORMAT_VERSION = 1
FIRST_READ = 4096  # bytes at the start of a file in which its header is hoped to end
_MAGIC = b"MRKVPOOL"
_FIXED = struct.Struct("<8sHHIQ32s")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader(BlockHeader):
    """What a file says of its block; `start` is where the payload begins, in bytes."""

    start: int

    def span(self, first: int, last: int) -> tuple[int, int]:
        """(offset in the file, bytes) of parts first..last (exclusive)."""
        return self.start + sum(self.sizes[:first]), sum(self.sizes[first:last])


def stored_bytes(block: PoolBlock) -> int:
    """What a block counts in any tier: the bytes of its file."""
    return _header_bytes(len(block.namespace.encode()), block.parts) + len(block.payload)


def encode_header(block: PoolBlock) -> bytes:
    """All of the file before the payload."""
    namespace = block.namespace.encode()
    fixed = _FIXED.pack(_MAGIC, FORMAT_VERSION, len(namespace), block.parts, len(block.payload), block.key)
    head = b"".join((fixed, namespace, struct.pack(f"<{block.parts}I", *block.sizes), block.digests))
    return head + _checksum(block.key, head)


def header_bytes(start: bytes, file_bytes: int) -> int:
    """The length of a header by its first bytes, FIRST_READ of them or all there are. Raises CorruptChunk."""
    if len(start) < _FIXED.size:
        raise CorruptChunk("a block's file is too short for a header", code="header")
    magic, version, namespace_bytes, parts, _, _ = _FIXED.unpack_from(start)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise CorruptChunk("a block's file does not begin as one", code="header")
    length = _header_bytes(namespace_bytes, parts)
    if length > file_bytes:  # no memory is taken for what a damaged number says
        raise CorruptChunk("a block's file is too short for its header", code="header")
    return length


def decode_header(head: bytes, key: bytes, file_bytes: int) -> FileHeader:
    """The header in the first bytes of a file of `file_bytes`, which should hold block `key`. Raises CorruptChunk."""
    end = header_bytes(head, file_bytes)
    _, _, namespace_bytes, parts, payload_bytes, found = _FIXED.unpack_from(head)
    sealed = end - DIGEST_BYTES
    if _checksum(found, head[:sealed]) != head[sealed:end]:
        raise CorruptChunk("a block's file has a damaged header", code="header")
    sizes_at = _FIXED.size + namespace_bytes
    digests_at = sizes_at + 4 * parts
    header = FileHeader(
        key=found,
        namespace=head[_FIXED.size : sizes_at].decode(),
        sizes=struct.unpack_from(f"<{parts}I", head, sizes_at),
        digests=head[digests_at : digests_at + DIGEST_BYTES * parts],
        start=end,
    )
    if found != key:
        raise CorruptChunk("a file holds the block of another key", code="key")
    if sum(header.sizes) != payload_bytes or end + payload_bytes != file_bytes:
        raise CorruptChunk("a block's file does not have the length its header tells", code="length")
    return header


def _checksum(key: bytes, head: bytes) -> bytes:
    """Of a header; no part's digest can be taken for it, there being none of 0 parts."""
    return part_digest(key, 0, 0, head)


def _header_bytes(namespace_bytes: int, parts: int) -> int:
    return _FIXED.size + namespace_bytes + (4 + DIGEST_BYTES) * parts + DIGEST_BYTES
