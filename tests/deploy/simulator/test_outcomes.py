"""What counts as met, and figures over many requests."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deploy.simulator.outcomes import OutcomeColumns, RequestOutcome, figures
from serving.messages import FinishReason, Request, SamplingParams, Slo


def outcome(**fields: Any) -> RequestOutcome:
    """Eleven tokens, the first after 0.1 s, then one each 20 ms: within its objectives."""
    request = Request(
        request_id="r",
        prompt=(1,),
        sampling=SamplingParams(max_tokens=11),
        slo=Slo(ttft_ms=fields.pop("ttft_ms", 150.0), tpot_ms=fields.pop("tpot_ms", 30.0)),
    )
    plain = {
        "arrived": 5.0,
        "first_token": 5.1,
        "last_token": 5.3,
        "ended": 5.3,
        "tokens": list(range(11)),
        "finish": FinishReason.LENGTH,
    }
    return RequestOutcome(request=request, **{**plain, **fields})


def test_latencies_are_those_of_the_client() -> None:
    assert outcome().ttft == pytest.approx(0.1)
    assert outcome().tpot == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, True),
        ({"ttft_ms": 99.0}, False),
        ({"tpot_ms": 19.0}, False),
        ({"ttft_ms": None, "tpot_ms": None}, True),
        ({"error": "queue_full"}, False),
        ({"finish": None}, False),
        ({"first_token": None, "tokens": [], "finish": None, "error": "no_room"}, False),
        ({"tokens": [1], "last_token": 5.1, "tpot_ms": 0.001}, True),
    ],
)
def test_both_objectives_are_to_be_met_and_an_end_reached(fields: dict[str, Any], met: bool) -> None:
    assert outcome(**fields).met is met


def test_attainment_is_of_all_that_was_offered() -> None:
    refused = outcome(first_token=None, last_token=None, tokens=[], finish=None, error="queue_full")
    found = figures(
        2.0, [OutcomeColumns([outcome(), refused]), OutcomeColumns([outcome(ttft_ms=50.0), outcome(tpot_ms=1.0)])]
    )
    assert (found.offered, found.attainment, found.ttft_attainment, found.tpot_attainment) == (4, 0.25, 0.5, 0.5)
    assert found.errors == {"queue_full": 1}
    assert found.ttft_p50 == pytest.approx(100) and found.tpot_p90 == pytest.approx(20)
    assert found.good_rate == pytest.approx(0.5)


def test_without_any_token_there_are_no_quantiles() -> None:
    found = figures(1.0, [OutcomeColumns([outcome(first_token=None, tokens=[], error="gone")])])
    assert math.isnan(found.ttft_p50) and math.isnan(found.tpot_p90)


@pytest.mark.parametrize("served", [1.0, 0.5])
def test_the_backlog_grows_by_what_is_not_served(served: float) -> None:
    """Arrivals ten a second for 100 s, ended at a share of that rate."""
    run = [outcome(arrived=n / 10, ended=n / 10 / served + 0.3) for n in range(1000)]
    assert OutcomeColumns(run).backlog_slope == pytest.approx(10 * (1 - served), abs=0.05)


def test_what_never_ends_stays_in_the_backlog() -> None:
    run = [outcome(arrived=n / 10, ended=None, finish=None) for n in range(100)]
    assert OutcomeColumns(run).backlog_slope == pytest.approx(10, rel=0.01)
