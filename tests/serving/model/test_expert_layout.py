"""Layouts of one expert a rank, and which prefill rank feeds which decode rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.model.expert_layout import OneExpertARank, prefill_rank_of
from tests.serving.model.test_expert_balance import floor, zipf


@pytest.mark.parametrize("exponent", [0.8, 1.0])
def test_320_ranks_hold_32_shared_256_routed_and_32_redundant(exponent: float) -> None:
    layout, loads = OneExpertARank(), zipf(exponent)
    placement = layout.placed(loads)
    copies = placement.copies()
    assert len(placement.slots) == layout.ranks == 320
    assert copies[layout.shared_expert] == 32
    assert sum(copies[: layout.routed]) == 256 + 32
    of_routed = max(load / count for load, count in zip(loads, copies, strict=False)) * 288 / sum(loads)
    assert of_routed == pytest.approx(floor(loads, 288))
    served = Counter(layout.shared_rank_of(rank) for rank in range(320))
    assert set(served.values()) == {10}
    assert all(placement.slots[rank] == (layout.shared_expert,) for rank in served)


def test_layouts_that_are_uneven_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be spread evenly"):
        OneExpertARank(shared=3, routed=8, redundant=2)
    with pytest.raises(ValueError, match="loads of 256"):
        OneExpertARank().placed([1.0])


def test_every_prefill_rank_feeds_ten_of_320_decode_ranks() -> None:
    """Prefill of width 32, decode of 320 ranks of width 1, as CloudMatrix-Infer has it."""
    fed = Counter(prefill_rank_of(rank, 0, prefill_tp=32, decode_tp=1, decode_dp=320) for rank in range(320))
    assert fed == dict.fromkeys(range(32), 10)
    assert [prefill_rank_of(rank, 0, prefill_tp=32, decode_tp=1, decode_dp=320) for rank in (0, 9, 10)] == [0, 0, 1]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_kv_is_pulled_evenly(decode_tp: int, groups: int, group_size: int) -> None:
    prefill_tp, decode_dp = decode_tp * groups, groups * group_size
    fed = Counter(
        prefill_rank_of(dp, tp, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_dp=decode_dp)
        for dp in range(decode_dp)
        for tp in range(decode_tp)
    )
    assert fed == dict.fromkeys(range(prefill_tp), group_size)


@pytest.mark.parametrize(
    ("dp", "tp", "prefill_tp", "decode_tp", "decode_dp", "message"),
    [
        (0, 0, 3, 2, 4, "evenly"),
        (0, 0, 4, 2, 3, "evenly"),
        (4, 0, 4, 2, 4, "no decode rank"),
        (0, 2, 4, 2, 4, "no decode rank"),
    ],
)
def test_widths_that_do_not_fit_are_refused(
    dp: int, tp: int, prefill_tp: int, decode_tp: int, decode_dp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prefill_rank_of(dp, tp, prefill_tp=prefill_tp, decode_tp=decode_tp, decode_dp=decode_dp)
