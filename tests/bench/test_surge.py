"""Loads that change: when requests come, what is counted where, and when a surge is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.mixture import RequestKind
from bench.sse import Outcome
from bench.summary import SloTargets
from bench.surge import Arrived, LoadSpan, bounds, figures, recovery_seconds, timed_in_spans, windows

QUICK = RequestKind(name="quick", slo=SloTargets(ttft_ms=100))
SLOW = RequestKind(name="slow")
SPANS = [
    LoadSpan(name="before", seconds=10, rates={"quick": 2.0, "slow": 0.0}),
    LoadSpan(name="surge", seconds=5, rates={"quick": 4.0, "slow": 20.0}),
    LoadSpan(name="after", seconds=20, rates={"quick": 2.0}),
]


def arrived(at: float, *, kind: str = "quick", ttft: float = 0.05, error: str | None = None) -> Arrived:
    answered = {} if error else {"first": ttft, "last": ttft}
    return Arrived(at, Outcome(prompt_tokens=1, max_tokens=1, kind=kind, error=error, **answered))  # type: ignore[arg-type]


@given(seed=st.integers(0, 1000))
def test_each_kind_comes_at_its_rate_in_each_span(seed: int) -> None:
    timed = timed_in_spans([QUICK, SLOW], SPANS, seed=seed)
    assert [one.at for one in timed] == sorted(one.at for one in timed)
    counts = [
        [sum(one.kind is kind and first <= one.at < last for one in timed) for kind in (QUICK, SLOW)]
        for _, first, last in bounds(SPANS)
    ]
    assert counts == [[20, 0], [20, 100], [40, 0]]


def test_seeds_and_spans_have_prompts_of_their_own() -> None:
    runs = [timed_in_spans([QUICK], SPANS, seed=seed) for seed in (0, 1)]
    prompts = [one.ask.pieces for run in runs for one in run]
    assert len(set(prompts)) == len(prompts)


def test_what_became_of_requests_is_counted_where_they_came() -> None:
    all_of_it = [arrived(1), arrived(2, ttft=0.2), arrived(11, error="HTTP 429"), arrived(12, error="HTTP 500")]
    all_of_it += [arrived(12, kind="slow", ttft=9.0)]
    found = {(one.kind, one.span): one for one in figures(all_of_it, [QUICK, SLOW], SPANS)}
    before, during, slow = found["quick", "before"], found["quick", "surge"], found["slow", "surge"]
    assert (before.offered, before.met, before.completed, before.attainment) == (2, 1, 2, 0.5)
    assert (during.offered, during.met, during.refused, during.failed) == (2, 0, 1, 1)
    assert (slow.met, slow.ttft, slow.tpot) == (1, (9.0,), ())
    assert found["slow", "after"].attainment == 0.0


def every_second(missed_until: float) -> list[Arrived]:
    return [arrived(at / 2, ttft=0.2 if at / 2 < missed_until else 0.05) for at in range(30, 70)]


def test_a_surge_is_over_when_every_later_window_attains_again() -> None:
    assert recovery_seconds(every_second(0.0), QUICK, 15.0, 35.0, 1.0) == 0.0
    # Seconds 15 to 22 missed: windows of 5 s with one of them left among ten attain 90 %, which is enough.
    assert recovery_seconds(every_second(22.0), QUICK, 15.0, 35.0, 1.0) == pytest.approx(6.5)
    assert recovery_seconds(every_second(34.0), QUICK, 15.0, 35.0, 1.0) is None
    assert recovery_seconds([], QUICK, 15.0, 35.0, 1.0) is None
    assert recovery_seconds(every_second(34.0), QUICK, 15.0, 35.0, 0.0) == 0.0


def test_windows_cover_the_span_and_skip_silence() -> None:
    looks = windows([arrived(3.0), arrived(4.0, ttft=1.0), arrived(30.0)], QUICK, 0.0, 10.0, step=2.5)
    assert looks == [(0.0, 0.5), (2.5, 0.5)]
