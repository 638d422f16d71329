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
    full = (len(tokens) if upto is None else upto) // block_size
    previous = keys[-1] if keys else root
    for i in range(len(keys), full):
        block = array("I", tokens[i * block_size : (i + 1) * block_size])
        previous = sha256(previous + block.tobytes()).digest()
        keys.append(previous)
