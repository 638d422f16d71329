"""Guessing and beginning ahead take turns: what brings more is done, and what guessing would bring is tried again."""

from __future__ import annotations

import pytest

from decode.scheduler import AHEAD_STEPS, TRIAL_STEPS, Turns
from serving.engine.record import StepRecord


def record(hidden: float = 0.0, step: float = 1.0) -> StepRecord:
    return StepRecord(
        began=0.0,
        sequences=4,
        new_tokens=4,
        context_tokens=9,
        schedule_seconds=0.0,
        batch_seconds=0.0,
        forward_seconds=step,
        sample_seconds=0.0,
        step_seconds=step,
        hidden_seconds=hidden,
    )


def guess(turns: Turns, right: int) -> None:
    """A step of four sequences that guesses."""
    assert turns.guessing
    turns.guess(4)
    turns.right += right
    turns.measured(record())


def trial(turns: Turns, right: int) -> None:
    for _ in range(TRIAL_STEPS):
        guess(turns, right)


def ahead(turns: Turns, hidden: float) -> None:
    assert not turns.guessing
    turns.measured(record(hidden))


def test_guessing_is_tried_then_steps_begin_ahead_until_that_has_been_measured() -> None:
    turns = Turns()
    trial(turns, right=4)
    ahead(turns, hidden=0.25)
    assert turns.saved == pytest.approx(0.2)


@pytest.mark.parametrize(("right", "guesses"), [(0, False), (1, True), (4, True)])
def test_what_brings_more_is_done(right: int, guesses: bool) -> None:
    turns = Turns()
    trial(turns, right)
    ahead(turns, hidden=0.1)
    assert turns.guessing == guesses


def test_guesses_that_are_no_longer_right_give_way() -> None:
    turns = Turns()
    trial(turns, right=4)
    ahead(turns, hidden=0.25)
    steps = 0
    while turns.guessing:
        guess(turns, right=0)
        steps += 1
    assert 1 < steps < 30


def test_guessing_is_tried_again_from_time_to_time() -> None:
    turns = Turns()
    trial(turns, right=0)
    for _ in range(AHEAD_STEPS):
        ahead(turns, hidden=0.25)
    trial(turns, right=4)
    assert turns.guessing, "the text has begun to repeat itself"


def test_a_prompts_steps_between_say_nothing() -> None:
    turns = Turns()
    trial(turns, right=1)
    gain = turns.gain
    turns.measured(record())
    assert turns.gain == gain and not turns.guessing


def test_where_no_step_can_begin_ahead_nearly_all_guess() -> None:
    turns = Turns()
    trial(turns, right=0)
    guessing = []
    for _ in range(200):
        guessing.append(turns.begin())
        if guessing[-1]:
            guess(turns, right=0)
        else:
            turns.measured(record())
    assert guessing.count(False) < 20 and not all(guessing[-30:]), "it may be possible again"


def test_a_prompt_between_costs_one_step_that_guesses() -> None:
    turns = Turns()
    trial(turns, right=0)
    for _ in range(5):
        assert not turns.begin()  # beside a prompt's chunk: nothing can begin ahead of it
        turns.measured(record())
        assert turns.begin()
        guess(turns, right=0)
        assert not turns.begin() and turns.begin_ahead()
        ahead(turns, hidden=0.5)
