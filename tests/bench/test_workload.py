"""Loads: the lengths asked for, the same for the same seed, arrivals that are Poisson, traces read and stretched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lengths import CONTEXT, read_pairs, resampled_pairs, sharegpt_pairs
from bench.replay import TraceLine, read_trace, trace_arrivals
from bench.workload import Workload, poisson_arrivals


def test_fixed_lengths_are_exact_and_contents_fresh() -> None:
    work = Workload(input_len=12, output_len=5)
    asks = work.asks(4, seed=1)
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in asks] == [(12, 5)] * 4
    assert len({ask.pieces for ask in asks}) == 4
    assert asks == work.asks(4, seed=1)
    fresh = work.asks(4, seed=1, fresh=1)
    assert not {ask.pieces for ask in asks} & {ask.pieces for ask in fresh}


def test_sharegpt_lengths_stay_while_contents_change() -> None:
    work = Workload(kind="sharegpt")
    first, second = work.asks(50, seed=3), work.asks(50, seed=3, fresh=1)
    lengths = [(ask.prompt_tokens, ask.output_tokens) for ask in first]
    assert lengths == [(ask.prompt_tokens, ask.output_tokens) for ask in second]
    assert lengths != [(ask.prompt_tokens, ask.output_tokens) for ask in work.asks(50, seed=4)]
    assert [ask.pieces for ask in first] != [ask.pieces for ask in second]


def test_the_table_has_sharegpts_moments() -> None:
    """Of the conversations it was fitted to: means 759 and 186, medians 681 and 77, p90 1,543 and 513."""
    pairs = np.array(sharegpt_pairs(20_000, seed=0))
    assert pairs.mean(axis=0) == pytest.approx([759, 186], rel=0.03)
    assert np.median(pairs, axis=0) == pytest.approx([681, 77], rel=0.05)
    assert np.percentile(pairs, 90, axis=0) == pytest.approx([1543, 513], rel=0.03)
    assert pairs.min() >= 1
    assert pairs.sum(axis=1).max() <= CONTEXT
    ranks = pairs.argsort(axis=0).argsort(axis=0)
    assert np.corrcoef(ranks[:, 0], ranks[:, 1]).item(1) == pytest.approx(
        -0.12, abs=0.04
    )  # long prompts, short answers


def test_pairs_are_drawn_without_repeats_while_they_last() -> None:
    pairs = [(n, n + 1) for n in range(1, 11)]
    assert sorted(resampled_pairs(pairs, 10, seed=5)) == pairs
    drawn = resampled_pairs(pairs, 25, seed=5)
    assert len(drawn) == 25
    assert set(drawn) == set(pairs)


@given(share=st.floats(0, 1), groups=st.integers(1, 5), length=st.integers(1, 60))
def test_prompts_share_the_prefix_that_was_asked_for(share: float, groups: int, length: int) -> None:
    work = Workload(kind="shared-prefix", input_len=length, prefix_share=share, prefix_groups=groups)
    asks = work.asks(20, seed=2)
    shared = round(length * share)
    assert all(ask.prompt_tokens == length for ask in asks)
    assert len({ask.pieces[:shared] for ask in asks}) <= groups
    if shared < length:
        assert len({ask.pieces[shared:] for ask in asks}) == 20


def test_all_groups_are_used() -> None:
    work = Workload(kind="shared-prefix", input_len=10, prefix_groups=3)
    assert len({ask.pieces[:5] for ask in work.asks(60, seed=0)}) == 3


@given(rate=st.floats(0.01, 1e4), count=st.integers(0, 300), seed=st.integers(0, 2**40))
def test_arrivals_are_reproducible_ordered_and_as_fast_as_asked(rate: float, count: int, seed: int) -> None:
    times = poisson_arrivals(rate, count, seed)
    assert times == poisson_arrivals(rate, count, seed)
    assert len(times) == count
    assert times == sorted(times)
    if count:
        assert times[0] == 0
    if count > 1:
        assert times[-1] == pytest.approx((count - 1) / rate)


def test_gaps_are_exponential() -> None:
    gaps = np.diff(poisson_arrivals(2.0, 50_000, seed=1))
    assert gaps.mean() == pytest.approx(0.5, rel=0.001)
    assert gaps.std() == pytest.approx(0.5, rel=0.02)  # an exponential's deviation is its mean
    assert (gaps > 1.0).mean() == pytest.approx(np.exp(-2), rel=0.05)
    assert poisson_arrivals(2.0, 10, seed=1) != poisson_arrivals(2.0, 10, seed=2)


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        poisson_arrivals(0.0, 3, seed=0)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "trace.jsonl",
        {"arrival_s": 2, "prompt": "hello there", "output_tokens": 4},
        {"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 3},
        "",
        {"arrival_s": 1, "prompt": [5, 6], "output_tokens": 1},
    )
    asks = Workload(kind="trace", trace=read_trace(path)).asks(4, seed=0)
    assert [(len(ask.pieces), ask.prompt, ask.output_tokens) for ask in asks] == [
        (7, None, 3),
        (0, (5, 6), 1),
        (0, "hello there", 4),
        (7, None, 3),  # round again
    ]
    assert asks[0].pieces != asks[3].pieces


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1"),
        ([1], "expected an object"),
        ({"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}, "`arrival_s`"),
        ({"arrival_s": True, "prompt_tokens": 1, "output_tokens": 1}, "`arrival_s`"),
        ({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 0}, "`output_tokens`"),
        ({"arrival_s": 0, "output_tokens": 1}, "`prompt_tokens`"),
        ({"arrival_s": 0, "prompt_tokens": 1.5, "output_tokens": 1}, "`prompt_tokens`"),
        ({"arrival_s": 0, "prompt": ["a"], "output_tokens": 1}, "`prompt`"),
        ({"arrival_s": 0, "prompt": "", "output_tokens": 1}, "`prompt`"),
        ({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "when": 3}, "unknown field `when`"),
    ],
)
def test_a_bad_trace_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_trace(write_lines(tmp_path / "trace.jsonl", line))


def trace_at(*times: float) -> list[TraceLine]:
    return [TraceLine(arrival_s=time, prompt_tokens=1, output_tokens=1) for time in times]


def test_a_trace_starts_at_once_repeats_and_stretches() -> None:
    trace = trace_at(10.0, 11.0, 14.0)
    assert trace_arrivals(trace, 3, None) == [0.0, 1.0, 4.0]
    assert trace_arrivals(trace, 5, None) == [0.0, 1.0, 4.0, 6.0, 7.0]  # the next round after a mean gap of 2
    assert trace_arrivals(trace, 3, rate=1.0) == [0.0, 0.5, 2.0]
    assert trace_arrivals(trace, 0, rate=1.0) == []
    with pytest.raises(ValueError, match="stretched"):
        trace_arrivals(trace_at(3.0, 3.0), 2, rate=1.0)


@pytest.mark.parametrize("content", ["{}", "[]", "[[1, 2], [3]]", "[[1, 0]]", "[[1.5, 2]]", "nonsense"])
def test_a_bad_file_of_lengths_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"--lengths .*lengths\.json"):
        read_pairs(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_len": 0},
        {"output_len": 0},
        {"kind": "shared-prefix", "prefix_share": 1.1},
        {"kind": "shared-prefix", "prefix_groups": 0},
        {"kind": "trace"},
    ],
)
def test_senseless_workloads_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Workload(**wrong)  # type: ignore[arg-type]
