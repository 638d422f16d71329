"""The digest of a chunk: XXH3-128 over its header and over the XXH3-128 of each LEAF bytes of its payload.

It tells corrupted bytes, not forged ones: whoever can send chunks can send their digests. As a tree of one level it can
be computed in parallel, beside the copy on the device that has the bytes (serving.kernels.gpu.leaf_digests).
"""

from __future__ import annotations

import xxhash

LEAF = 65_536  # bytes; the last leaf is filled up with zeros, and the header tells how long the payload is
DIGEST_BYTES = 16


def leaves_of(payload: bytes | memoryview) -> bytes:
    """The digest of each leaf, 16 bytes each."""
    view = memoryview(payload)  # slices of bytes would be copies
    whole = len(view) - len(view) % LEAF
    digests = [xxhash.xxh3_128_digest(view[start : start + LEAF]) for start in range(0, whole, LEAF)]
    if whole < len(view):
        digests.append(xxhash.xxh3_128_digest(bytes(view[whole:]).ljust(LEAF, b"\0")))
    return b"".join(digests)


def root_of(header: bytes, leaves: bytes) -> bytes:
    """The digest: 16 bytes."""
    return xxhash.xxh3_128_digest(header + leaves)
