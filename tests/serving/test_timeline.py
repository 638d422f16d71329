"""A request's life as timestamps, and the latencies read from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.timeline import Moment, Timeline

EVENTS = st.lists(st.tuples(st.sampled_from(list(Moment)), st.floats(0, 100)), max_size=12)


@given(EVENTS, st.sampled_from(list(Moment)), st.sampled_from(list(Moment)))
def test_the_time_between_is_that_of_the_first_of_each(
    events: list[tuple[Moment, float]], begin: Moment, end: Moment
) -> None:
    timeline = Timeline()
    for moment, now in events:
        timeline.note(moment, now)
    firsts: dict[Moment, float] = {}
    for moment, now in events:
        firsts.setdefault(moment, now)
    expected = firsts[end] - firsts[begin] if begin in firsts and end in firsts else None
    assert timeline.between(begin, end) == expected
    assert timeline.events == events


@pytest.mark.parametrize(
    ("first", "last", "tokens", "tpot"),
    [(None, None, 0, None), (1.0, 1.0, 1, None), (1.0, 3.0, 2, 2.0), (1.0, 3.0, 5, 0.5), (1.0, None, 5, None)],
)
def test_time_per_token_leaves_the_first_out(
    first: float | None, last: float | None, tokens: int, tpot: float | None
) -> None:
    timeline = Timeline(tokens=tokens, last_token=last)
    if first is not None:
        timeline.note(Moment.FIRST_TOKEN, first)
    assert timeline.tpot == tpot
