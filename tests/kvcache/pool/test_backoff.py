"""How long a node that failed is left alone."""

from __future__ import annotations

from kvcache.pool.backoff import Backoff


def failing() -> Backoff:
    """Failed once, at time 0."""
    pauses = Backoff(first=1.0, longest=5.0)
    assert pauses.may_ask("a", 0.0) and pauses.failed("a", 0.0)
    return pauses


def test_a_node_that_failed_is_left_alone_and_no_other() -> None:
    pauses = failing()
    assert not pauses.may_ask("a", 0.99) and pauses.may_ask("b", 0.5)


def test_after_the_pause_one_caller_tries() -> None:
    pauses = failing()
    assert pauses.may_ask("a", 1.0) and not pauses.may_ask("a", 1.0)


def test_a_probe_that_succeeds_lets_everyone_in() -> None:
    pauses = failing()
    assert pauses.may_ask("a", 1.0)
    pauses.answered("a")
    assert pauses.may_ask("a", 1.0) and pauses.may_ask("a", 1.0)


def test_pauses_double_up_to_the_longest() -> None:
    pauses, now = failing(), 0.0
    for wait in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert not pauses.may_ask("a", now + wait - 0.1)
        assert pauses.may_ask("a", now + wait)
        now += wait
        assert not pauses.failed("a", now), "only the first failure is news"


def test_calls_that_were_under_way_together_fail_once() -> None:
    pauses = failing()
    for _ in range(10):
        assert not pauses.failed("a", 0.5)
    assert pauses.may_ask("a", 1.0), "the pause is still the first one"


def test_a_probe_that_never_reports_back_does_not_shut_the_node_out() -> None:
    pauses = failing()
    assert pauses.may_ask("a", 1.0) and not pauses.may_ask("a", 1.9) and pauses.may_ask("a", 2.0)


def test_a_node_that_left_and_came_back_starts_anew() -> None:
    pauses = failing()
    pauses.answered("a")
    assert pauses.may_ask("a", 0.1)
