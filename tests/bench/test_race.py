"""A contender's search: judged by all seeds together, ended early where it is hopeless, resumed where it was left."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contenders import Contender
from bench.goodput import SearchLimits
from bench.ledger import Trial, TrialKey
from bench.race import Race, attainment

OFFERED = 20
rates = st.floats(0.2, 50.0)


def race(start: float = 1.0, seeds: int = 3, tolerance: float = 0.05) -> Race:
    limits = SearchLimits(start=start, tolerance=tolerance, growth=1.3, lowest=0.01)
    return Race("case", Contender(name="a"), limits, range(seeds))


def ran(key: TrialKey, met: int, *, stopped: bool = False, ended: int = OFFERED) -> Trial:
    return Trial(key=key, offered=OFFERED, ended=ended, met=met, kinds={"chat": [ended, met]}, stopped=stopped)


def run(one: Race, share: Callable[[float], float], kept: dict[TrialKey, Trial] | None = None) -> int:
    """All that it wants, but for what is kept; how many runs that were."""
    count = 0
    while (key := one.next()) is not None:
        trial = (kept or {}).get(key)
        if trial is None:
            count += 1
            met = round(share(key.rate) * OFFERED)
            trial = ran(key, met, stopped=OFFERED - met > one.allowance(OFFERED))
        if kept is not None:
            kept[key] = trial
        one.record(trial)
    return count


@given(threshold=rates, start=rates, seeds=st.integers(1, 3))
def test_the_goodput_is_found_between_two_rates(threshold: float, start: float, seeds: int) -> None:
    found = race(start, seeds)
    run(found, lambda rate: 1.0 if rate <= threshold else 0.0)
    standing = found.standing()
    assert standing.finished and standing.rate is not None and standing.failing is not None
    assert standing.rate <= threshold < standing.failing <= standing.rate * 1.05 * (1 + 1e-9)
    assert standing.crossing is not None and standing.rate <= standing.crossing <= standing.failing
    assert all(len(trials) == seeds for rate, trials in standing.trials.items() if rate <= threshold)
    assert all(len(trials) == 1 for rate, trials in standing.trials.items() if rate > threshold)


def test_a_rate_is_judged_by_all_its_seeds_together() -> None:
    one = race()
    for met in (20, 20, 14):  # 54 of 60 are 90 %, though the last alone are 70 %
        key = one.next()
        assert key is not None and key.rate == 1.0
        one.record(ran(key, met))
    assert one.standing().rate == 1.0
    key = one.next()
    assert key is not None and key.rate == pytest.approx(1.3)


def test_a_rate_is_given_up_once_a_quarter_of_all_has_missed() -> None:
    one = race()
    assert one.allowance(OFFERED) == 15
    for met in (20, 12):
        key = one.next()
        assert key is not None
        one.record(ran(key, met))
    assert one.allowance(OFFERED) == 7
    key = one.next()
    assert key is not None and key.seed == 2
    one.record(ran(key, 1, stopped=True, ended=9))
    standing = one.standing()
    assert (standing.rate, standing.failing) == (None, 1.0)
    assert standing.attained[1.0] == pytest.approx(33 / 49)


@given(threshold=rates, slope=st.floats(1, 10), cut=st.integers(0, 40))
def test_what_is_kept_is_not_run_again_and_gives_the_same(threshold: float, slope: float, cut: int) -> None:
    def share(rate: float) -> float:
        return 1 / (1 + math.pow(rate / threshold, slope) / 9)

    kept: dict[TrialKey, Trial] = {}
    whole = race()
    count = run(whole, share, kept)
    rest = dict(list(kept.items())[:cut])
    again = race()
    assert run(again, share, rest) == max(0, count - cut)
    assert again.standing() == whole.standing()


def test_the_crossing_lies_on_the_line_between_the_two_rates() -> None:
    one = race(seeds=1, tolerance=0.5)
    for met in (20, 16):
        key = one.next()
        assert key is not None
        one.record(ran(key, met))
    standing = one.standing()
    assert standing.finished and (standing.rate, standing.failing) == (1.0, pytest.approx(1.3))
    assert standing.crossing == pytest.approx(1.15)
    assert standing.by_kind() == {"chat": 1.0}


def test_attainment_counts_what_was_offered_and_of_a_stopped_run_what_ended() -> None:
    key = TrialKey(case="c", contender="a", rate=1.0, seed=0)
    assert attainment([ran(key, 10, ended=15)]) == 0.5
    assert attainment([ran(key, 10, ended=16, stopped=True)]) == 10 / 16
    assert attainment([]) == 0.0
