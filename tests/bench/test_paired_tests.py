"""The permutation tests: p values are fair where nothing differs, and small where something does, shift or spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.paired_tests import compare

PAIRS = 200


def latencies(draw: np.random.Generator, drift: bool = True) -> np.ndarray:
    base = np.exp(draw.normal(0.0, 0.3, PAIRS))
    return base * np.linspace(1.0, 3.0, PAIRS) if drift else base


def test_where_nothing_differs_few_are_told_apart_though_all_drifts() -> None:
    draw = np.random.default_rng(1)
    found = [compare(latencies(draw), latencies(draw), rounds=199, seed=seed) for seed in range(100)]
    for name in ("mean_p", "ks_p"):
        small = sum(getattr(one, name) <= 0.1 for one in found)
        assert 2 <= small <= 22, f"{name}: 10 of 100 are expected"
    assert 0.45 < np.mean([one.auc for one in found]) < 0.55


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shift_is_found_by_both_and_a_spread_by_the_distance(seed: int) -> None:
    draw = np.random.default_rng(seed)
    first, second = latencies(draw), latencies(draw)
    shifted = compare(first * 0.8, second, rounds=999, seed=seed)
    assert shifted.mean_p < 0.01 and shifted.ks_p < 0.01 and shifted.differ(0.02)
    assert shifted.auc < 0.5 and shifted.median_difference < 0
    wide = np.exp(3 * np.log(latencies(draw, drift=False)))
    spread = compare(wide, latencies(draw, drift=False), rounds=999, seed=seed)
    assert spread.ks_p < 0.01 and spread.differ(0.02)


@given(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=20))
def test_equal_samples_are_equal(values: list[float]) -> None:
    found = compare(np.array(values), np.array(values), rounds=19, seed=0)
    assert (found.mean_p, found.ks_p, found.ks, found.auc) == (1.0, 1.0, 0.0, 0.5)


def test_the_least_p_is_that_of_all_rounds() -> None:
    found = compare(np.full(50, 1.0), np.full(50, 2.0), rounds=99, seed=0)
    assert found.mean_p == found.ks_p == 0.01 and found.auc == 0.0 and found.ks == 1.0
