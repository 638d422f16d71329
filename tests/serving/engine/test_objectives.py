"""A sequence's objectives: what an order says in relative seconds, on the engine's clock."""

from __future__ import annotations

from math import inf

import pytest

from serving.engine.objectives import Objectives
from serving.messages import Slo
from tests.fakes.sequences import make_order, make_sequence


def test_an_order_without_objectives_asks_for_nothing() -> None:
    goals = make_sequence(None, [1], now=7.0).objectives
    assert (goals.due, goals.ends, goals.tpot, goals.priority) == (inf, inf, inf, 0)
    assert not goals.stated
    goals.begin(2, 0, 9.0)
    assert goals.slack(5, 99.0) == inf and not goals.late(5, 99.0)


def test_relative_seconds_count_from_arrival() -> None:
    order = make_order([1], first_token_in=0.5, ends_in=3.0, slo=Slo(tpot_ms=50.0), priority=2)
    goals = Objectives.of(order, 7.0)
    assert (goals.due, goals.ends, goals.tpot, goals.priority) == (7.5, 10.0, 0.05, 2)


@pytest.mark.parametrize("fields", [{"priority": 1}, {"first_token_in": 1.0}, {"slo": Slo(tpot_ms=1.0)}])
def test_any_of_them_is_an_objective(fields: dict[str, object]) -> None:
    assert Objectives.of(make_order([1], **fields), 0.0).stated


def test_a_deadline_alone_orders_nothing() -> None:
    assert not Objectives.of(make_order([1], ends_in=1.0), 0.0).stated


def test_each_token_is_due_a_tpot_after_the_one_before_from_the_first_on() -> None:
    goals = Objectives(due=100.0, tpot=0.25)
    goals.begin(11, 0, 5.0)  # ten of the prompt, and the first
    assert [goals.slack(tokens, 5.0) for tokens in (11, 12, 15)] == [0.25, 0.5, 1.25]
    assert goals.slack(11, 6.0) == -0.75
    assert goals.late(11, 6.0) and not goals.late(15, 6.0)


def test_a_text_that_goes_on_keeps_the_pace_the_router_knows() -> None:
    goals = Objectives(due=4.0, tpot=0.5)
    goals.begin(21, 3, 9.0)  # the token that was due at 4 has come at 9
    assert not goals.missed, "its first token is not this worker's to judge"
    assert goals.slack(20, 4.0) == 0.0 and goals.slack(21, 9.0) == -4.5


def test_a_first_token_that_comes_late_is_remembered() -> None:
    for due, missed in ((4.0, True), (5.0, False)):
        goals = Objectives(due=due, tpot=1.0)
        goals.begin(2, 0, 5.0)
        assert goals.missed is missed and goals.late(2, 5.0) is missed
