"""The Pareto front: nothing on it is dominated, everything off it is, and NSGA-II finds it in a space of integers."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.planner.front import OBJECTIVES, dominates, evolved_front, pareto_front

VALUES = st.lists(st.tuples(*[st.integers(0, 4).map(float) for _ in OBJECTIVES]), max_size=24)


@given(VALUES)
def test_the_front_is_what_nothing_dominates(values: list[tuple[float, ...]]) -> None:
    front = pareto_front(values)
    for index, value in enumerate(values):
        beaten = any(dominates(other, value) for other in values)
        assert (index in front) == (not beaten)


@given(VALUES.filter(bool))
def test_whatever_is_off_the_front_is_dominated_by_something_on_it(values: list[tuple[float, ...]]) -> None:
    front = pareto_front(values)
    assert front
    for index in set(range(len(values))) - set(front):
        assert any(dominates(values[other], values[index]) for other in front)


def judge(genes: tuple[int, ...]) -> tuple[float, ...] | None:
    one, two, three = genes
    return None if one + two > 14 else (-float(one + two), float(one), float(two), float(three), float(one + three))


@pytest.mark.skipif(importlib.util.find_spec("pymoo") is None, reason="needs pymoo (extra `plan`)")
def test_evolution_finds_points_of_the_exact_front() -> None:
    sizes = (12, 12, 6)
    found = evolved_front(sizes, judge, seed=1, generations=12)
    once, again = (evolved_front(sizes, judge, seed=1, generations=3) for _ in range(2))
    assert once == again
    space = [(a, b, c) for a in range(12) for b in range(12) for c in range(6)]
    allowed = [(genes, judged) for genes in space if (judged := judge(genes)) is not None]
    exact = {allowed[index][0] for index in pareto_front([judged for _, judged in allowed])}
    assert len(exact & set(found)) >= 0.5 * len(exact)
    assert all(judge(genes) is not None for genes in found)
