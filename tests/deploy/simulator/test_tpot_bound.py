"""What came beside a decode is counted right, the bound is what a regression can reach, every decode is recorded."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from deploy.simulator import tpot_bound
from deploy.simulator.cluster import ClusterPlan
from deploy.simulator.tpot_bound import PROFILE, PlacedText, bound, least_deviations, main, recorded
from serving.messages import Role


def known(at: float, tokens: int = 256, **fields: object) -> PlacedText:
    plain = PlacedText(
        at=at, worker="one", tokens=tokens, raw=0.01, predicted=0.01, told=0.01, step=0.01, rows=1, share=0.0
    )
    return replace(plain, **{"ended": at + 10.0, "first_token": at + 1.0, "observed": 0.01, **fields})


def test_long_prompts_count_by_when_they_come_and_how_long_they_stay() -> None:
    chat = known(10.0)
    before = known(8.0, 1500, first_token=12.0)
    over = known(5.0, 1500, first_token=9.0)
    later = known(15.0, 1500, first_token=17.0)
    after = known(21.0, 1500, first_token=25.0)
    elsewhere = known(11.0, 1500, first_token=13.0, worker="two")
    chat.overlap([chat, known(11.0), before, over, later, after, elsewhere])
    assert (chat.there, chat.later) == (1, 1)
    assert chat.beside == pytest.approx((2.0 + 2.0) / 10.0)


def test_the_least_deviations_heed_no_outlier() -> None:
    rows = np.array([[1.0, float(x)] for x in range(40)])
    wanted = 0.5 + 0.25 * rows[:, 1]
    wanted[::10] += 100.0
    assert least_deviations(rows, wanted) == pytest.approx([0.5, 0.25], abs=0.05)


def test_the_bound_is_what_is_left_once_the_features_are_known() -> None:
    draws = np.random.default_rng(1)
    runs = [
        [
            known(0.0, rows=int(row), later=int(come), observed=0.01 * exp(0.1 * row + 0.7 * come))
            for row, come in zip(draws.integers(0, 9, 200), draws.integers(0, 2, 200), strict=True)
        ]
        for _ in range(2)
    ]
    of_rows = bound(runs, lambda one: [1.0, one.rows])
    assert bound(runs, lambda one: [1.0, one.rows, one.later]) < 0.01
    assert 0.2 < of_rows < bound(runs, lambda one: [1.0])


def test_every_decode_is_recorded_as_it_was_predicted_and_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpot_bound, "SECONDS", 12.0)
    found = recorded(ClusterPlan.of(PROFILE, (Role.MIXED,) * 2, "goodput"), 1)
    assert len(found) == round(1.6 * 12) + round(1.3 * 12)
    for one in found:
        assert one.at < one.first_token < one.ended
        assert min(one.raw, one.predicted) > 0.0 and 0.005 < one.observed < 1.0
    assert any(one.beside for one in found)


def test_a_single_run_has_no_others_to_learn_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
    assert "--seeds" in capsys.readouterr().err
