"""A plan keeps to its budgets, whoever fills it."""

from __future__ import annotations

import pytest

from serving.engine.plan import StepPlan, Work
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_kv

BY = make_decoding(make_kv(1, 1))


def test_work_takes_from_the_budgets() -> None:
    plan = StepPlan(10, 2)
    plan.add(make_sequence(None, [1] * 9), 4, BY)
    assert (plan.tokens, plan.seqs) == (6, 1)


@pytest.mark.parametrize(("tokens", "seqs", "count"), [(3, 1, 4), (3, 0, 1), (3, 1, 0), (3, 1, -1)])
def test_more_than_is_left_is_a_bug(tokens: int, seqs: int, count: int) -> None:
    with pytest.raises(AssertionError):
        StepPlan(tokens, seqs).add(make_sequence(None, [1] * 9), count, BY)


def test_a_sequence_in_flight_cannot_be_planned_again() -> None:
    seq = make_sequence(None, [1])
    seq.in_flight = True
    with pytest.raises(AssertionError):
        StepPlan(3, 3).add(seq, 1, BY)


def test_work_completes_when_it_reaches_the_last_token() -> None:
    seq = make_sequence(None, [1] * 5)
    seq.computed = 2
    assert [Work(seq, count, BY).completes for count in (1, 2, 3)] == [False, False, True]
