"""Whose turn it is for room: a router that was refused goes before those that hold much more, for a moment."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from decode.turns import CLAIM_SECONDS, RouterTurns

PLACES = 8


def test_one_router_alone_never_waits_for_its_turn() -> None:
    turns = RouterTurns()
    turns.refused("a", 0.0)
    assert not turns.others_first("a", {"a": PLACES}, 0.1)


def test_a_router_that_was_refused_goes_first_until_it_is_served_or_gone() -> None:
    turns = RouterTurns()
    turns.refused("b", 0.0)
    assert turns.others_first("a", {"a": 7}, 0.1)
    assert not turns.others_first("b", {"a": 7}, 0.1)
    turns.settled("b")
    assert not turns.others_first("a", {"a": 7, "b": 1}, 0.1)


def test_a_claim_that_is_not_renewed_lapses() -> None:
    turns = RouterTurns()
    turns.refused("b", 0.0)
    assert turns.others_first("a", {"a": 7}, CLAIM_SECONDS - 0.01)
    assert not turns.others_first("a", {"a": 7}, CLAIM_SECONDS)


def test_routers_that_hold_about_as_much_do_not_wait_for_each_other() -> None:
    turns = RouterTurns()
    turns.refused("b", 0.0)
    assert not turns.others_first("a", {"a": 5, "b": 2}, 0.1)
    assert turns.others_first("a", {"a": 6, "b": 2}, 0.1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_somebody_is_always_served_and_all_who_ask_get_their_share(order: list[tuple[str, bool]]) -> None:
    """Routers ask in any order, leases end in any order: with room there is always one whose turn it is."""
    turns, held, now = RouterTurns(), Counter[str](), 0.0
    for name, ends in order:
        now += 0.01
        if ends and held[name]:
            held[name] -= 1
        elif held.total() >= PLACES:
            turns.refused(name, now)
        else:
            assert not all(turns.others_first(each, held, now) for each in "abc")
            if not turns.others_first(name, held, now):
                turns.settled(name)
                held[name] += 1


def test_a_late_router_reaches_its_share_though_another_asks_for_every_place_first() -> None:
    turns, held, now = RouterTurns(), Counter({"a": PLACES}), 0.0
    for _ in range(40):
        now += 0.1
        turns.refused("b", now)
        held["a" if held["a"] else "b"] -= 1  # a lease ends
        for name in ("a", "b"):
            if held.total() < PLACES and not turns.others_first(name, held, now):
                turns.settled(name)
                held[name] += 1
    assert held["b"] >= PLACES // 4 and held.total() == PLACES
