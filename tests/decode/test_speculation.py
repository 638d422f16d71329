"""Drafting: what is drafted, when it is thought to pay, and that both are functions of what was seen."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.speculation import RARE, SIZES, TRIED, PromptLookup, Speculation
from serving.engine.plan import StepRecord
from serving.step_cost import StepLoad
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_kv

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
    made = Speculation(4)
    for size in (1, 2, 4, 8, 16, 32) * 3:
        made.cost.observe(size, base + slope * size)
    assert made.needed(batch) == pytest.approx(slope * batch / (base + slope * batch), rel=1e-3, abs=1e-4)


def test_nothing_is_known_from_steps_of_one_size() -> None:
    made = Speculation(4)
    for _ in range(20):
        made.cost.observe(8, 0.01)
    assert made.needed(8) == 1.0 and not made.cost.known


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


BASE, SLOPE = 0.010, 0.010  # seconds: at one token half of a step's time is the token's


def measured(made: Speculation, tokens: int, prompt: int = 0) -> float:
    """A step of so many tokens that takes what it does by BASE and SLOPE."""
    seconds = BASE + SLOPE * tokens
    record = StepRecord(
        **{"began": 0.0, "load": StepLoad(tokens), "prompt_tokens": prompt, "step_seconds": seconds},
        **dict.fromkeys(("schedule_seconds", "batch_seconds", "forward_seconds", "sample_seconds"), 0.0),
    )
    made.measured(record)
    return seconds


def known(limit: int = 4) -> Speculation:
    made = Speculation(limit)
    for size in (1, 2, 8, 32):
        measured(made, size)
    return made


def test_drafts_that_fail_are_not_computed_any_more() -> None:
    made, lookup, repeating = known(), PromptLookup(), [1, 2, 3, 4] * 4
    for _ in range(20):
        made.verified(lookup, 4, 0)
    assert not any(made.draft(lookup, repeating, room=10, batch=1) for _ in range(3 * RARE))
    assert (made.drafts, made.drafted, made.accepted) == (20, 80, 0)


def texts(chance: float) -> Iterator[list[int]]:
    """A text a token longer each time: it goes round, and turns off after a token in 1 / (1 - chance)."""
    draw, text = random.Random(7), [1, 2, 3, 4] * 4
    while True:
        yield text
        text.append(text[-1] % 4 + 1 if draw.random() < chance else draw.randint(5, 30))


def test_it_learns_what_drafts_are_worth_without_computing_one() -> None:
    """And drafts as soon as they pay."""
    made, lookup = known(), PromptLookup(0.0)
    drafted = 0
    for text, _ in zip(texts(1.0), range(60), strict=False):
        measured(made, 1)
        drafted += bool(made.draft(lookup, text, 10, 1))
    assert lookup.accepted > 0.5 and drafted > 10 and made.drafted == 0


@pytest.mark.parametrize(("chance", "least", "most"), [(0.0, 0.0, 0.2), (0.8, 0.6, 0.95)])
def test_what_it_learns_is_the_chance_of_a_token(chance: float, least: float, most: float) -> None:
    found = []
    made, lookup = Speculation(4), PromptLookup()
    for text, _ in zip(texts(chance), range(400), strict=False):
        made.draft(lookup, text, 10, 64)
        found.append(lookup.accepted)
    assert least <= statistics.mean(found[100:]) <= most


@given(st.floats(0.0, 1.0), st.floats(1e-3, 1e-1), st.floats(1e-5, 1e-1), st.integers(1, 64), st.integers(0, 8))
def test_a_draft_is_as_deep_as_brings_the_most_tokens_a_second(
    chance: float, base: float, slope: float, batch: int, most: int
) -> None:
    made = Speculation(8)
    for size in (1, 2, 8, 32, 64) * 3:
        made.cost.observe(size, base + slope * size)
    step, each = made.cost.seconds(batch), made.cost.slope
    assert step is not None

    def pace(count: int) -> float:
        return (batch + sum(chance**place for place in range(1, count + 1))) / (step + each * count)

    best = max(map(pace, range(most + 1)))
    assert pace(made.depth(chance, batch, most)) == pytest.approx(best, rel=1e-9)


def test_what_drafts_cost_is_learned_in_a_small_share_of_time() -> None:
    """They would have to be right half of the time to pay, and are two times in five."""
    made, lookup = known(), PromptLookup(0.4)
    time = tried = 0.0
    for text, _ in zip(texts(1.0), range(2000), strict=False):
        lookup.share.accepted, lookup.share.drafted = 40.0, 98.0
        draft = made.draft(lookup, text, 10, 1)
        if draft:
            made.verified(lookup, len(draft), 0)
        time += measured(made, 1 + len(draft))
        tried += SLOPE * len(draft)
    assert 0.0 < tried <= TRIED * time + 4 * SLOPE


def test_where_nothing_is_known_of_the_cost_it_is_tried() -> None:
    made, lookup = Speculation(4), PromptLookup(0.4)
    measured(made, 1)
    assert not made.cost.known
    for text, _ in zip(texts(1.0), range(400), strict=False):
        measured(made, 1 + len(made.draft(lookup, text, 10, 1)))
    assert made.cost.known and made.cost.slope == pytest.approx(SLOPE)


def test_one_trial_at_a_time_beside_sequences_whose_drafts_pay() -> None:
    """What was right in those pays for no trial."""
    made, text = known(), [1, 2, 3, 4] * 4
    paying, others = PromptLookup(0.99), [PromptLookup(0.0) for _ in range(4)]
    for lookup in others:
        lookup.share.accepted, lookup.share.drafted = 40.0, 98.0
    time = tried = 0.0
    for _ in range(1000):
        made.verified(paying, 4, 4)
        drafts = [made.draft(lookup, text, 10, 1) for lookup in others]
        assert sum(map(bool, drafts)) <= 1
        for lookup, draft in zip(others, drafts, strict=True):
            if draft:
                made.verified(lookup, len(draft), 0)
                lookup.share.accepted, lookup.share.drafted = 40.0, 98.0
        time += measured(made, 1)
        tried += SLOPE * sum(map(len, drafts))
    assert 0.0 < tried <= TRIED * time + 4 * SLOPE + 1e-9


def test_a_new_sequence_expects_what_guesses_for_others_have_shown() -> None:
    made, lookup = known(), PromptLookup(0.0)
    for text, _ in zip(texts(1.0), range(6), strict=False):
        made.rests(lookup, text, 64)
    fresh = made.begin(make_sequence(make_kv(8, 4), [1, 2, 3], max_tokens=9), 1)
    assert made.drafts == 0 and fresh.accepted > 0.6


def test_a_newcomer_whose_text_repeats_itself_drafts_after_one_guess() -> None:
    made, lookup = known(), PromptLookup(0.2)
    steps = next(step for step, text in zip(range(60), texts(1.0), strict=False) if made.draft(lookup, text, 10, 1))
    assert steps <= made.limit + 1


def test_guesses_that_are_far_from_right_are_made_seldom() -> None:
    made, lookup, taken = known(), PromptLookup(0.0), 0
    for text, _ in zip(texts(0.0), range(240), strict=False):
        before = lookup.seen
        made.draft(lookup, text, 10, 1)
        taken += lookup.seen != before
    assert taken <= 240 / made.limit + 1


def test_what_a_grammar_leaves_nothing_of_was_wrong() -> None:
    made, lookup = known(), PromptLookup(0.5)
    made.allowance = 1e-3
    draft = made.draft(lookup, [1, 2, 3, 4] * 4, 10, 1)
    assert draft and made.allowance < 0.0
    made.refused(lookup, len(draft))
    assert lookup.accepted < 0.5 and made.allowance == pytest.approx(1e-3) and made.drafted == 0


def test_steps_with_prompts_tell_nothing_of_a_drafted_token() -> None:
    """A prompt's tokens cost less each: one step of 500 would let every draft seem cheap."""
    made = known()
    before = made.needed(8)
    made.measured(
        StepRecord(
            **{"began": 0.0, "load": StepLoad(500), "prompt_tokens": 492, "step_seconds": 0.05},
            **dict.fromkeys(("schedule_seconds", "batch_seconds", "forward_seconds", "sample_seconds"), 0.0),
        )
    )
    assert made.needed(8) == before


def test_accepted_tokens_are_counted_by_their_place_in_the_draft() -> None:
    made, lookup = Speculation(3), PromptLookup()
    for drafted, accepted in ((3, 1), (3, 3), (1, 0)):
        made.verified(lookup, drafted, accepted)
    assert (made.drafts, made.drafted, made.accepted, made.accepted_at) == (3, 7, 4, [2, 1, 1])


def test_large_batches_need_better_drafts() -> None:
    made, lookup, repeating = Speculation(4), PromptLookup(0.8), [1, 2, 3, 4] * 4
    for size in (1, 2, 8, 32):
        made.cost.observe(size, 0.01 + 0.001 * size)
    assert len(made.draft(lookup, repeating, room=10, batch=1)) == 4
    assert len(made.draft(lookup, repeating, room=10, batch=8)) == 3
    assert [len(made.draft(lookup, repeating, room=10, batch=64)) for _ in range(3)] == [0, 0, 0]
