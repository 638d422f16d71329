"""Content-addressed block keys: a hash chain over a sequence's tokens, rooted in everything else the KV depends on.

    key[-1] = H(model fingerprint, tenant, rope variant)
    key[i]  = H(key[i-1], token ids of block i)

Equal keys mean equal KV bytes, so a block may be shared wherever its key is known. Pure; no torch, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_key(fingerprint: str, tenant: str = "", long_rope: bool = False) -> bytes:
    """The key before block 0. Different models, KV layouts, tenants or rope variants can never share a block."""
    parts = (fingerprint.encode(), tenant.encode(), b"long" if long_rope else b"short")
    digest = sha256(b"millrace-kv-1")
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, upto: int | None = None
) -> None:
    """Append to `keys` the key of every full block of `tokens[:upto]` it does not have yet. 32 bytes a key."""
    first, full = len(keys), (len(tokens) if upto is None else upto) // block_size
    if full <= first:
        return
    ids = array("I", tokens[first * block_size : full * block_size])
    data, width = ids.tobytes(), ids.itemsize * block_size
    previous = keys[-1] if keys else root
    for start in range(0, len(data), width):
        previous = sha256(previous + data[start : start + width]).digest()
        keys.append(previous)
