"""XXH3-128 of every LEAF bytes, on a device: the leaves of `kvcache.handoff.tree_digest`.

XXH3 takes a long input block by block, one after another, which a device does slowly; leaves are independent, and are
digested side by side. Constants and steps are those of the
algorithm's specification (xxHash, doc/xxhash_spec.md), for an input of LEAF bytes with the default secret.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from serving.kernels.gpu.launch import kernel, kernel_of_any, require

LEAF = 65_536  # bytes
DIGEST_BYTES = 16
LEAVES = 1  # of one program
BLOCK = 1024  # bytes between two scrambles

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
MASK64 = (1 << 64) - 1

# Where in the table of 64-bit words: the secret, what of it the last stripe and the two halves use, the first sums and
# what the halves begin with.
_LAST, _LOW, _HIGH, _SUMS, _LENGTHS, _WORDS = 24, 32, 40, 48, 56, 58


@cache
def constants(leaf: int = LEAF) -> Tensor:
    """The table of words for leaves of so many bytes: int64 [58], on the CPU."""
    sums = (PRIME32[2], *PRIME64[:4], PRIME32[1], PRIME64[4], PRIME32[0])
    lengths = (leaf * PRIME64[0] & MASK64, ~(leaf * PRIME64[1]) & MASK64)
    secrets = b"".join((SECRET, *(SECRET[start : start + 64] for start in (121, 11, 117))))
    words = np.concatenate([np.frombuffer(secrets, "<u8"), np.array([*sums, *lengths], np.uint64)])
    assert len(words) == _WORDS
    return torch.from_numpy(words.view(np.int64))


def leaf_digests(words: Tensor, data: Tensor, digests: Tensor, *, size: int, leaf: int = LEAF) -> None:
    """Write the leaves' digests of the first `size` bytes of `data`, uint8, to `digests`, uint8: 16 bytes each.

    The last leaf is filled up with zeros, which need not be there. `size` is a multiple of 8, `leaf` one of 1,024;
    `words` are its `constants`.
    """
    require(leaf % BLOCK == 0, "leaves are of whole kilobytes")
    require(size % 8 == 0 and size < 2**31, "leaves are digested by words of 8 bytes")
    leaves = triton.cdiv(size, leaf)
    grid = (triton.cdiv(leaves, LEAVES),)
    _digest[grid](words, data, digests, size // 8, leaves, BLOCKS=leaf // BLOCK, LEAVES=LEAVES, num_warps=1)


def as_digests(written: bytes) -> bytes:
    """What the kernel has written in XXH3's own order of bytes: the upper half first, each from its upper byte on."""
    return np.frombuffer(written, "<u8").reshape(-1, 2)[:, ::-1].astype(">u8").tobytes()


@kernel_of_any("count", "leaves")
def _digest(  # type: ignore[no-untyped-def]
    words,  # [58] int64
    data,  # uint8
    digests,  # uint8
    count,  # words of data
    leaves,
    BLOCKS: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Program p digests leaves p * LEAVES and on, a block of 16 stripes at a time: within one, sums have no order.

    The next block is loaded while one is summed up.
    """
    leaf = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    stripe, lane = tl.arange(0, 16), tl.arange(0, 8)
    at = (leaf * (BLOCKS * 128))[:, None, None] + (stripe[:, None] * 8 + lane[None, :])[None, :, :]
    numbers = data.to(tl.pointer_type(tl.uint64))
    table = words.to(tl.pointer_type(tl.uint64))
    prime = tl.full([1, 1], 0x9E3779B1, tl.uint64)
    lower = tl.full([1, 1, 1], 0xFFFFFFFF, tl.uint64)
    keys = tl.load(table + stripe[:, None] + lane[None, :])[None, :, :]
    last_keys = tl.load(table + tl.where(stripe == 15, 24, stripe)[:, None] + lane[None, :])[None, :, :]
    scramble = tl.load(table + 16 + lane)[None, :]
    sums = tl.load(table + 48 + lane)[None, :] + tl.zeros([LEAVES, 8], tl.uint64)
    value = tl.load(numbers + at, mask=at < count, other=0)
    for block in range(BLOCKS):
        later = at + (block + 1) * 128
        following = tl.load(numbers + later, mask=(later < count) & (block + 1 < BLOCKS), other=0)
        key = value ^ tl.where(block == BLOCKS - 1, last_keys, keys)
        sums += tl.sum((key & lower) * (key >> 32), axis=1) + _swapped(tl.sum(value, axis=1), LEAVES)
        if block != BLOCKS - 1:
            sums = ((sums ^ (sums >> 47)) ^ scramble) * prime
        value = following
    low = _half(sums, tl.load(table + 32 + lane)[None, :], tl.load(table + 56), LEAVES)
    high = _half(sums, tl.load(table + 40 + lane)[None, :], tl.load(table + 57), LEAVES)
    out = digests.to(tl.pointer_type(tl.uint64)) + leaf * 2
    tl.store(out, low, mask=leaf < leaves)
    tl.store(out + 1, high, mask=leaf < leaves)


@kernel
def _swapped(sums, LEAVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each column where its neighbour was: [LEAVES, 8]."""
    even, odd = tl.split(tl.reshape(sums, [LEAVES, 4, 2]))
    return tl.reshape(tl.join(odd, even), [LEAVES, 8])


@kernel
def _half(sums, keys, start, LEAVES: tl.constexpr):  # type: ignore[no-untyped-def]
    """One half of each digest: [LEAVES]."""
    even, odd = tl.split(tl.reshape(sums ^ keys, [LEAVES, 4, 2]))
    folded = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=1) + start
    folded = (folded ^ (folded >> 37)) * tl.full([1], 0x165667919E3779F9, tl.uint64)
    return folded ^ (folded >> 32)
