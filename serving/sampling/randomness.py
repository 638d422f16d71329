"""Random numbers as a pure function of (seed, position, stream): there is no state to carry from token to token.

So any worker can draw the token at any position of any request. No torch here, and no clock.

The construction is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011: a keyed bijection of a 128-bit counter. The seed is the key; the counter is (position, stream).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as 32-bit fractions
LOW32 = 0xFFFFFFFF


Words = tuple[int, int, int, int]
WordArrays = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of four 32-bit counter words under two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & LOW32, (even >> 32) ^ c3 ^ k1, even & LOW32
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & LOW32, (k1 + KEY_INCREMENTS[1]) & LOW32
    return c0, c1, c2, c3


def philox_arrays(counter: WordArrays, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> WordArrays:
    """`philox` over arrays of one shape. Every element is below 2^32, held in 64 bits so that products fit."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, half = np.uint64(LOW32), np.uint64(32)
    for _ in range(ROUNDS):
        even, odd = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (odd >> half) ^ c1 ^ k0, odd & low, (even >> half) ^ c3 ^ k1, even & low
        k0, k1 = (k0 + np.uint64(KEY_INCREMENTS[0])) & low, (k1 + np.uint64(KEY_INCREMENTS[1])) & low
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits.

    `seed` and `position` are unsigned 64-bit, `stream` unsigned 32-bit: independent draws at one position.
    """
    first, second, _, _ = philox((position & LOW32, position >> 32, stream, 0), (seed & LOW32, seed >> 32))
    return ((first >> 5) * 2**26 + (second >> 6)) * 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: int = 0) -> NDArray[np.float64]:
    """`uniform` of each (seed, position) pair, bit for bit the same numbers, as float64 [len(seeds)]."""
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    low, half = np.uint64(LOW32), np.uint64(32)
    lane, zero = np.full_like(position, stream), np.zeros_like(position)
    first, second, _, _ = philox_arrays((position & low, position >> half, lane, zero), (seed & low, seed >> half))
    mantissa = (first >> np.uint64(5)) * np.uint64(2**26) + (second >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-53
