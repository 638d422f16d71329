"""Random numbers as a pure function of (seed, position): there is no state to carry from token to token.

So any worker can sample the token at any position of any request. No torch here, and no clock.

The construction is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011: a keyed bijection of a 128-bit counter. The seed is the key; the counter is (position, 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as 32-bit fractions
LOW32 = 0xFFFFFFFF

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def philox(counter: Words, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> Words:
    """Philox4x32-10 of four counter words under two key words: arrays of one shape of 32-bit words, held in 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, half = np.uint64(LOW32), np.uint64(32)
    for _ in range(ROUNDS):
        even, odd = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (odd >> half) ^ c1 ^ k0, odd & low, (even >> half) ^ c3 ^ k1, even & low
        k0, k1 = (k0 + np.uint64(KEY_INCREMENTS[0])) & low, (k1 + np.uint64(KEY_INCREMENTS[1])) & low
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """For each pair of a seed and a position, unsigned 64 bits, a number in [0, 1) with 53 random bits, float64 [N]."""
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    low, half = np.uint64(LOW32), np.uint64(32)
    zero = np.zeros_like(position)
    first, second, _, _ = philox((position & low, position >> half, zero, zero), (seed & low, seed >> half))
    mantissa = (first >> np.uint64(5)) * np.uint64(2**26) + (second >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-53
