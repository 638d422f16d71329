"""The search for the highest good rate, on servers that are nothing but a function of the rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.goodput import GoodputSearch, SearchLimits

rates = st.floats(0.02, 5e4)


def search(attained: Callable[[float], float], limits: SearchLimits) -> GoodputSearch:
    found = GoodputSearch(limits)
    while (rate := found.next_rate()) is not None:
        assert limits.lowest <= rate <= limits.highest
        found.record(rate, attained(rate))
    return found


def step(threshold: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= threshold else 0.0


@given(threshold=rates, start=rates, tolerance=st.floats(0.01, 0.5))
def test_a_sharp_threshold_is_found_within_the_tolerance(threshold: float, start: float, tolerance: float) -> None:
    found = search(step(threshold), SearchLimits(start=start, tolerance=tolerance, probes=100))
    assert found.answer is not None
    assert found.answer <= threshold
    assert threshold <= found.answer * (1 + tolerance) * (1 + 1e-9)


@given(threshold=rates, slope=st.floats(0.5, 20), start=rates)
def test_a_soft_monotone_decline_is_found_where_it_crosses(threshold: float, slope: float, start: float) -> None:
    def attained(rate: float) -> float:
        return 1 / (1 + math.pow(rate / threshold, slope) / 9)  # 0.9 exactly at the threshold

    found = search(attained, SearchLimits(start=start, tolerance=0.05, probes=100))
    assert found.answer is not None
    assert found.answer == pytest.approx(threshold, rel=0.051)
    assert attained(found.answer) >= 0.9


@given(threshold=rates, start=rates)
def test_it_costs_as_many_probes_as_doublings_and_halvings_ask_for(threshold: float, start: float) -> None:
    found = search(step(threshold), SearchLimits(start=start, tolerance=0.05, probes=100))
    distance = abs(threshold / start if threshold > start else start / threshold)
    assert len(found.measured) <= distance.__ceil__().bit_length() + 2 + 4


@given(seed=st.integers(0, 2**32), threshold=st.floats(0.1, 1000), noise=st.floats(0, 0.3), confirm=st.integers(0, 4))
def test_noise_cannot_make_it_loop_or_contradict_itself(
    seed: int, threshold: float, noise: float, confirm: int
) -> None:
    draw = random.Random(seed)

    def attained(rate: float) -> float:
        return min(1.0, max(0.0, 1 / (1 + (rate / threshold) ** 4 / 9) + draw.uniform(-noise, noise)))

    limits = SearchLimits(start=1.0, confirmations=confirm, probes=60)
    found = search(attained, limits)
    assert sum(map(len, found.measured.values())) <= limits.probes
    failing = [rate for rate in found.measured if not found.passes(rate)]
    if found.answer is not None:
        assert found.passes(found.answer)
        assert all(rate > found.answer for rate in failing)


def test_with_confirmations_a_lucky_rate_does_not_stand() -> None:
    """At 2 the first measurement is luck; the next two show it, and the answer moves below."""
    measured: dict[float, int] = {}

    def attained(rate: float) -> float:
        measured[rate] = measured.get(rate, 0) + 1
        lucky = rate == 2.0 and measured[rate] == 1
        return 1.0 if rate < 1.5 or lucky else 0.5

    assert search(attained, SearchLimits(start=1.0, tolerance=1.0, confirmations=0)).answer == 2.0
    measured.clear()
    answer = search(attained, SearchLimits(start=1.0, tolerance=0.05, confirmations=2)).answer
    assert answer is not None
    assert answer < 1.5


@pytest.mark.parametrize(("attained", "answer"), [(0.0, None), (1.0, 64.0)])
def test_nothing_attains_or_everything_does(attained: float, answer: float | None) -> None:
    assert search(lambda rate: attained, SearchLimits(lowest=0.5, highest=64.0)).answer == answer


def test_the_number_of_probes_is_a_limit() -> None:
    found = search(step(1e4), SearchLimits(probes=3))
    assert list(found.measured) == [1.0, 2.0, 4.0]
    assert found.answer == 4.0


@pytest.mark.parametrize(
    "wrong", [{"start": 0.0}, {"attainment": 0.0}, {"attainment": 1.1}, {"tolerance": 0.0}, {"probes": 0}]
)
def test_senseless_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SearchLimits(**wrong)  # type: ignore[arg-type]
