"""What is lent is lent once, comes back, and rests for as long as somebody may still write to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.transfer.lending import Lending


def test_all_parts_are_lent_once_and_the_warm_one_first() -> None:
    lending = Lending(3, 60.0)
    assert [lending.lend(0.0) for _ in range(4)] == [0, 1, 2, None]
    lending.take_back(1, 0.0, settled=True)
    lending.take_back(0, 0.0, settled=True)
    assert lending.lend(0.0) == 0


def test_a_part_that_may_still_be_written_to_rests() -> None:
    lending = Lending(1, 60.0)
    part = lending.lend(0.0)
    assert part == 0
    lending.take_back(part, 5.0, settled=False)
    assert lending.lend(64.9) is None and lending.lend(65.0) == 0


def test_nobody_gives_back_what_he_does_not_have() -> None:
    lending = Lending(1, 60.0)
    with pytest.raises(AssertionError):
        lending.take_back(0, 0.0, settled=True)


@given(st.lists(st.tuples(st.sampled_from(["lend", "settled", "lost"]), st.floats(0.0, 5.0)), max_size=60))
def test_whatever_happens_no_part_is_lent_twice_nor_before_it_rested(events: list[tuple[str, float]]) -> None:
    lending, now, lent, lost = Lending(3, 10.0), 0.0, list[int](), dict[int, float]()
    for what, later in events:
        now += later
        if what == "lend":
            part = lending.lend(now)
            at_rest = {other for other, since in lost.items() if now < since + 10.0}
            assert (part is None) == (len(lent) + len(at_rest) == 3)
            if part is not None:
                assert part not in lent and part not in at_rest
                lost.pop(part, None)
                lent.append(part)
        elif lent:
            part = lent.pop(0)
            lending.take_back(part, now, settled=what == "settled")
            if what == "lost":
                lost[part] = now
    assert sorted([*lending.free, *lending.lent, *lending.resting]) == [0, 1, 2]
