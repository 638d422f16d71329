"""Figures: defined as vLLM's benchmark defines them, errors counted apart, medians and ratios that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import Run
from bench.sse import Outcome
from bench.summary import SloTargets, Summary, median_metrics, ratios, recount_warning, spread, summarize


def outcome(sent: float = 0.0, ttft: float = 0.5, tpot: float = 0.1, tokens: int = 11, **changes: object) -> Outcome:
    """An answer of `tokens` tokens, one a chunk, with usage, to 100 prompt tokens."""
    last = sent + ttft + tpot * (tokens - 1)
    fields: dict[str, object] = {
        "prompt_tokens": 100, "max_tokens": tokens, "scheduled": sent, "sent": sent, "first": sent + ttft, "last": last,
        "finished": last, "gaps": [tpot] * (tokens - 1), "chunks": tokens, "reported": tokens, "done": True,
    }  # fmt: skip
    return Outcome(**fields | changes)  # type: ignore[arg-type]


def failure(kind: str = "HTTP 500", sent: float = 0.0, detail: str = "oh") -> Outcome:
    return Outcome(prompt_tokens=100, max_tokens=11, sent=sent, finished=sent + 0.01, error=kind, detail=detail)


def run_of(*outcomes: Outcome, **changes: object) -> Run:
    return Run(**{"planned": len(outcomes), "outcomes": list(outcomes), **changes})  # type: ignore[arg-type]


def test_throughput_is_over_first_send_to_last_finish() -> None:
    summary = summarize(run_of(outcome(sent=10.0), outcome(sent=10.5, ttft=1.0)), SloTargets())
    metrics = summary.metrics
    assert metrics["duration"] == pytest.approx(2.5)  # 10.0 to 10.5 + 1.0 + 1.0
    assert metrics["request_throughput"] == pytest.approx(2 / 2.5)
    assert metrics["output_throughput"] == pytest.approx(22 / 2.5)
    assert metrics["total_token_throughput"] == pytest.approx(222 / 2.5)
    assert "request_goodput" not in metrics
    assert summary.clean


def test_latencies_are_in_milliseconds_and_tpot_leaves_the_first_token_out() -> None:
    metrics = summarize(run_of(outcome(), outcome(ttft=1.5, tpot=0.3), outcome(tokens=1)), SloTargets()).metrics
    assert metrics["mean_ttft_ms"] == pytest.approx((500 + 1500 + 500) / 3)
    assert metrics["mean_tpot_ms"] == pytest.approx(200)  # the single token has none
    assert metrics["median_itl_ms"] == pytest.approx(200)
    assert metrics["mean_e2el_ms"] == pytest.approx((1500 + 4500 + 500) / 3)


def test_percentiles_interpolate() -> None:
    metrics = spread("x", [0.0, 0.001, 0.002, 0.003, 0.010])
    assert metrics == pytest.approx({"mean_x_ms": 3.2, "median_x_ms": 2.0, "p90_x_ms": 7.2, "p99_x_ms": 9.72})
    assert spread("x", []) == {}


def test_goodput_wants_both_objectives_of_one_request() -> None:
    slo = SloTargets(ttft_ms=600, tpot_ms=150)
    good, late, slow = outcome(), outcome(ttft=0.7), outcome(tpot=0.2)
    single = outcome(tokens=1)
    metrics = summarize(run_of(good, late, slow, single, failure()), slo).metrics
    assert metrics["slo_attainment"] == pytest.approx(2 / 5)  # a failed request has missed
    assert metrics["request_goodput"] == pytest.approx(2 / metrics["duration"])
    assert SloTargets(ttft_ms=500).met(good)
    assert not SloTargets(ttft_ms=499).met(good)
    assert SloTargets(tpot_ms=150).met(late)


def test_failures_are_counted_by_kind_and_touch_no_latency() -> None:
    summary = summarize(
        run_of(outcome(), failure(), failure("refused"), failure(detail="later"), failure("interrupted")), SloTargets()
    )
    assert summary.errors == {"HTTP 500": 2, "refused": 1}
    assert summary.examples["HTTP 500"] == "oh"
    assert (summary.completed, summary.failed, summary.clean) == (1, 3, False)
    assert summary.metrics["mean_ttft_ms"] == 500


def test_a_run_of_failures_alone_has_no_latencies() -> None:
    summary = summarize(run_of(failure(), failure()), SloTargets(ttft_ms=1.0))
    assert not [name for name in summary.metrics if "ttft" in name or "tpot" in name]
    assert summary.metrics["output_throughput"] == 0
    assert summary.metrics["slo_attainment"] == 0


def test_an_early_end_counts_what_was_planned_only_when_it_was_hopeless() -> None:
    slo = SloTargets(ttft_ms=600)
    outcomes = [outcome(), outcome(ttft=0.7), failure("interrupted")]
    hopeless = summarize(run_of(*outcomes, planned=10, stopped="hopeless"), slo)
    assert hopeless.metrics["slo_attainment"] == pytest.approx(1 / 10)
    interrupted = summarize(run_of(*outcomes, planned=10, stopped="interrupted"), slo)
    assert interrupted.metrics["slo_attainment"] == pytest.approx(1 / 2)
    assert not interrupted.clean


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 12}, "shorter than asked"),
        ({"reported": None}, "without usage"),
        ({"reported": 9}, "more chunks than their usage"),
        ({"token_ids": 11, "reported": 12}, "another number of tokens"),
        ({"chunks": 5}, "2.20 tokens on average"),
        ({"scheduled": -0.05}, "50 ms late"),
    ],
)
def test_what_makes_figures_doubtful_is_said(changes: dict[str, object], words: str) -> None:
    warnings = summarize(run_of(outcome(**changes)), SloTargets()).warnings  # type: ignore[arg-type]
    assert sum(words in warning for warning in warnings) == 1


def test_an_honest_run_has_no_warning() -> None:
    assert summarize(run_of(outcome(), outcome()), SloTargets()).warnings == ()


def test_a_client_at_its_limit_says_so() -> None:
    warnings = summarize(run_of(outcome(), outcome(), client_cpu_s=1.4), SloTargets()).warnings
    assert ["used 93% of a core" in warning for warning in warnings] == [True]


def test_recounting_allows_a_tenth() -> None:
    assert recount_warning([100, 100], [95, 90]) == ""
    assert recount_warning([100, 100], [100, 140]) == ""
    assert "re-tokenizes to 120 tokens where 200" in recount_warning([100, 100], [60, 60])


def summary_of(value: float, *, errors: int = 0, stopped: str = "") -> Summary:
    kinds = {"refused": errors} if errors else {}
    return Summary(planned=4, completed=4 - errors, errors=kinds, stopped=stopped, metrics={"x": value})


def test_medians_are_of_clean_rounds_while_there_is_one() -> None:
    assert median_metrics([summary_of(1), summary_of(5), summary_of(3)]) == {"x": 3}
    assert median_metrics([summary_of(1), summary_of(3), summary_of(90, errors=1)]) == {"x": 2}
    assert median_metrics([summary_of(1, errors=1), summary_of(3, stopped="hopeless")]) == {"x": 2}
    assert median_metrics([]) == {}


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-6, 1e6)), st.floats(0.01, 100))
def test_ratios_undo_a_multiplication(base: dict[str, float], factor: float) -> None:
    times = ratios({name: value * factor for name, value in base.items()}, base)
    assert times == pytest.approx(dict.fromkeys(base, factor))


def test_a_ratio_to_nothing_is_left_out() -> None:
    assert ratios({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 0.0, "b": 4.0}) == {"b": 0.5}
