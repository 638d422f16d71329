"""The random stream: published vectors of the generator, and that each number is a function of its arguments alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.sampling.randomness import philox, uniforms

U64 = st.integers(0, 2**64 - 1)

# From kat_vectors of the authors' Random123 library, entries "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> Any:
    return tuple(int(word, 16) for word in text.split())


def test_philox_known_answers() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    expected = np.array([words(result) for _, _, result in KNOWN_ANSWERS], dtype=np.uint64).T
    assert np.array_equal(np.stack(philox(tuple(counters), tuple(keys))), expected)


@settings(deadline=None)
@given(st.lists(st.tuples(U64, U64), min_size=1, max_size=8))
def test_a_number_does_not_depend_on_those_beside_it(pairs: list[tuple[int, int]]) -> None:
    found = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert found.tolist() == [float(uniforms([seed], [position])[0]) for seed, position in pairs]


@settings(deadline=None)
@given(U64, U64)
def test_uniform_has_53_bits_and_never_reaches_one(seed: int, position: int) -> None:
    value = float(uniforms([seed], [position])[0])
    assert 0.0 <= value < 1.0
    assert (value * 2**53).is_integer()


def test_each_argument_in_full_changes_the_number() -> None:
    pairs = [(7, 11), (7 + 2**32, 11), (7, 11 + 2**32), (8, 11), (7, 12)]
    assert len({float(uniforms([seed], [position])[0]) for seed, position in pairs}) == 5


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_evenly_spread_along(along: str) -> None:
    fixed, moving = [5] * 20_000, list(range(20_000))
    drawn = uniforms(fixed, moving) if along == "positions" else uniforms(moving, fixed)
    counts = np.bincount((drawn * 50).astype(int), minlength=50)
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert 23.98 < chi_square < 85.35  # 0.1 % and 99.9 % points at 49 degrees of freedom
    neighbours = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(20_000)
