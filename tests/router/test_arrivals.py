"""The prompts that come in time from a worker: a few kinds, by priority and objective, which fade."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.arrivals import MOST_TOLD, ArrivalRates, Arrivals
from serving.share import MEAN_SECONDS

CHAT, LONG = Arrivals(0, 1.0, 0.2, 1.0), Arrivals(0, 6.0, 2.0, 0.5)


def test_kinds_are_told_apart_by_objective_and_priority() -> None:
    rates = ArrivalRates()
    for prompt in (CHAT, CHAT._replace(limit=1.1), LONG, CHAT._replace(priority=1)):
        rates.note(prompt, 0.0)
    assert sorted((kind.priority, round(kind.limit)) for kind in rates.expected(0.0)) == [(0, 1), (0, 6), (1, 1)]


def test_a_rate_is_by_weight_and_fades() -> None:
    rates = ArrivalRates()
    for second in range(200):
        for _ in range(4):
            rates.note(LONG, float(second))
    (kind,) = rates.expected(200.0)
    assert 1.8 < kind.rate < 2.2, "four a second of weight one half"
    (later,) = rates.expected(200.0 + 5 * MEAN_SECONDS)
    assert later.rate < kind.rate / 100 and (later.limit, later.seconds) == (6.0, 2.0)


@given(st.lists(st.tuples(st.integers(-(2**31), 2**31), st.floats(0.0, 1e300), st.floats(0, 1e300)), max_size=40))
def test_few_kinds_are_remembered_whatever_comes(prompts: list[tuple[int, float, float]]) -> None:
    rates = ArrivalRates()
    for at, (priority, limit, seconds) in enumerate(prompts):
        rates.note(Arrivals(priority, limit, seconds, 1.0), float(at))
    kinds = rates.expected(99.0)
    assert len(kinds) <= MOST_TOLD and bool(kinds) == bool(prompts)
    assert [kind.rate for kind in kinds] == sorted((kind.rate for kind in kinds), reverse=True)


def test_kinds_that_hardly_come_push_out_none_that_do() -> None:
    """Clients choose objectives and priorities: one of them could make all others' prompts unknown."""
    rates = ArrivalRates()
    for at in range(500):
        rates.note(CHAT, at * 0.1)
        if at % 5 == 0:
            rates.note(LONG._replace(priority=at), at * 0.1)
    first = rates.expected(50.0)[0]
    assert (first.priority, first.limit) == (0, 1.0) and first.rate > 9.0
