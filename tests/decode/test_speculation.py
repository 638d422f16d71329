"""Drafting: what is drafted, when it is thought to pay, and that both are functions of what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.speculation import RARE, SIZES, DraftCost, PromptLookup, Speculation

tokens = st.lists(st.integers(0, 3), max_size=60)


def slowly(tokens: list[int], count: int) -> list[int]:
    """The definition: the latest earlier place that ends like the sequence does, by the longest run there is."""
    for size in SIZES:
        if len(tokens) <= size:
            continue
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + count]
    return []


@given(tokens, st.integers(1, 6))
def test_a_draft_is_what_followed_last_time(found: list[int], count: int) -> None:
    assert PromptLookup().draft(found, count) == slowly(found, count)


@given(tokens, st.lists(st.integers(1, 5), max_size=30))
def test_taking_tokens_in_bit_by_bit_changes_nothing(found: list[int], steps: list[int]) -> None:
    """A worker that takes a sequence over drafts as the one before it did."""
    lookup, seen = PromptLookup(), 0
    for step in steps:
        seen = min(len(found), seen + step)
        assert lookup.draft(found[:seen], 4) == PromptLookup().draft(found[:seen], 4)


@given(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-2), st.integers(1, 64))
def test_the_cost_of_a_token_is_found_from_steps(base: float, slope: float, batch: int) -> None:
    cost = DraftCost()
    for size in (1, 2, 4, 8, 16, 32) * 3:
        cost.observe(size, base + slope * size)
    assert cost.token_share(batch) == pytest.approx(slope * batch / (base + slope * batch), rel=1e-3, abs=1e-4)


def test_nothing_is_known_from_steps_of_one_size() -> None:
    cost = DraftCost()
    for _ in range(20):
        cost.observe(8, 0.01)
    assert cost.token_share(8) == 1.0


def cheap(limit: int = 4) -> Speculation:
    """Steps that cost the same however many tokens they have: drafting is free."""
    made = Speculation(limit)
    for size in (1, 2, 8, 32):
        made.cost.observe(size, 0.01)
    return made


def test_it_drafts_as_long_as_that_is_free_and_within_the_room() -> None:
    made, repeating = cheap(), [1, 2, 3, 4] * 4
    assert made.draft(PromptLookup(), repeating, room=10, batch=1) == [1, 2, 3, 4]
    assert made.draft(PromptLookup(), repeating, room=2, batch=1) == [1, 2]
    assert made.draft(PromptLookup(), repeating, room=0, batch=1) == []


def test_it_stops_when_its_drafts_fail_and_looks_again_later() -> None:
    made, lookup, repeating = Speculation(4), PromptLookup(), [1, 2, 3, 4] * 4
    for size in (1, 2, 8, 32):
        made.cost.observe(size, 0.01 + 0.01 * size)  # at one token half of a step's time is the token's
    for _ in range(20):
        made.verified(lookup, 4, 0)
    drafts = [made.draft(lookup, repeating, room=10, batch=1) for _ in range(3 * RARE)]
    tried = [i for i, draft in enumerate(drafts) if draft]
    assert all(len(drafts[i]) == 1 for i in tried), "a trial costs one token"
    assert len(tried) == 3
    assert (made.drafts, made.drafted, made.accepted) == (20, 80, 0)


def test_accepted_tokens_are_counted_by_their_place_in_the_draft() -> None:
    made, lookup = Speculation(3), PromptLookup()
    for drafted, accepted in ((3, 1), (3, 3), (1, 0)):
        made.verified(lookup, drafted, accepted)
    assert (made.drafts, made.drafted, made.accepted, made.accepted_at) == (3, 7, 4, [2, 1, 1])


def test_large_batches_need_better_drafts() -> None:
    made, lookup, repeating = Speculation(4), PromptLookup(accepted=0.6), [1, 2, 3, 4] * 4
    for size in (1, 2, 8, 32):
        made.cost.observe(size, 0.01 + 0.001 * size)
    assert len(made.draft(lookup, repeating, room=10, batch=2)) == 4
    assert [len(made.draft(lookup, repeating, room=10, batch=64)) for _ in range(3)] == [1, 0, 0], "a trial, then none"
