"""A run measured and simulated: what is compared, how far apart it may be, and what the table says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agreement import (
    LATENCIES,
    Agreement,
    ServedFigures,
    agreement_table,
    measured_figures,
    simulated_figures,
    summary_line,
)
from bench.mixture import MIXTURES
from bench.sse import Outcome


def figures(attainment: float, latency: float | None) -> ServedFigures:
    return ServedFigures(offered=20, attainment=attainment, latencies=dict.fromkeys(LATENCIES, latency), errors={})


def agreement(*pairs: tuple[ServedFigures, ServedFigures]) -> Agreement:
    return Agreement(case="it", deployment="split", workload="chat", share=0.6, rate=2.5, pairs=pairs)


def answered(ttft: float, tpot: float) -> Outcome:
    return Outcome(
        prompt_tokens=9, max_tokens=3, kind="chat", sent=1.0, first=1.0 + ttft, last=1.0 + ttft + 2 * tpot, reported=3
    )


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 1e4), st.floats(1, 1e4))
def test_a_figure_is_too_far_beyond_five_points_or_fifteen_percent(
    one: float, other: float, measured: float, simulated: float
) -> None:
    found = agreement((figures(one, measured), figures(other, simulated)))
    assert ("attainment" in found.too_far) == (abs(100 * (other - one)) > 5)
    assert ({*LATENCIES} <= {*found.too_far}) == (abs(simulated / measured - 1) > 0.15)


def test_what_one_side_lacks_is_too_far() -> None:
    found = agreement((figures(1.0, 10.0), figures(1.0, None)))
    assert found.too_far == [*LATENCIES] and "—" in agreement_table([found])


def test_refused_requests_have_missed_and_have_no_latency() -> None:
    met = MIXTURES["chat"].met
    refused = Outcome(prompt_tokens=9, max_tokens=3, kind="chat", error="HTTP 429")
    found = measured_figures([answered(0.1, 0.01), answered(0.3, 0.02), answered(0.2, 0.05), refused], met)
    assert found.attainment == 0.5 and found.offered == 4 and found.errors == {"HTTP 429": 1}
    assert found.latencies["ttft_p50"] == pytest.approx(200) and found.latencies["tpot_p90"] == pytest.approx(44)
    assert set(measured_figures([refused], met).latencies.values()) == {None}


def test_the_table_shows_both_sides_and_how_far_apart_they_are() -> None:
    told = {"offered": 60, "attainment": 0.9, "errors": {}, **dict.fromkeys(LATENCIES, 120.0)}
    found = agreement((figures(0.95, 100.0), simulated_figures(told)))
    text = agreement_table([found])
    assert "95.0 → 90.0 (-5.0)" in text and "100 → 120 (+20%)" in text and "TTFT p50, ms" in text
    assert summary_line([found, agreement((figures(1, 10.0), figures(1, 10.0)))]).startswith("6 of 10 figures")


def test_runs_are_compared_each_with_its_own_simulation_and_the_median_counts() -> None:
    """One run of a slow machine does not decide; attainment is over all requests."""
    slow = figures(0.5, 300.0), figures(1.0, 100.0)
    found = agreement(slow, (figures(1.0, 100.0), figures(1.0, 110.0)), (figures(1.0, 200.0), figures(0.9, 220.0)))
    assert found.offered == 60 and found.points == pytest.approx(100 * (2.9 - 2.5) / 3)
    assert found.apart("ttft_p50") == pytest.approx(0.1) and found.latency("tpot_p90") == (200.0, 110.0)
    assert found.too_far == ["attainment"]
