"""Drafting or overlapping: what brings more is done, and what drafting would bring is tried again."""

from __future__ import annotations

import pytest

from decode.scheduler import AHEAD_STEPS, TRIAL_STEPS, DraftOrOverlap
from serving.engine.plan import StepRecord
from serving.step_cost import StepLoad


def record(hidden: float = 0.0, step: float = 1.0) -> StepRecord:
    return StepRecord(
        began=0.0,
        load=StepLoad(4, 9.0, 4, 9),
        schedule_seconds=0.0,
        batch_seconds=0.0,
        forward_seconds=step,
        sample_seconds=0.0,
        step_seconds=step,
        hidden_seconds=hidden,
    )


def draft(choice: DraftOrOverlap, right: int) -> None:
    """A step of four sequences that drafts."""
    assert choice.drafting
    choice.began(4)
    choice.accepted += right
    choice.measured(record())


def trial(choice: DraftOrOverlap, right: int) -> None:
    for _ in range(TRIAL_STEPS):
        draft(choice, right)


def ahead(choice: DraftOrOverlap, hidden: float) -> None:
    assert not choice.drafting
    choice.measured(record(hidden))


def test_drafting_is_tried_then_steps_begin_ahead_until_that_has_been_measured() -> None:
    choice = DraftOrOverlap()
    trial(choice, right=4)
    ahead(choice, hidden=0.25)
    assert choice.saved == pytest.approx(0.2)


@pytest.mark.parametrize(("right", "drafts"), [(0, False), (1, True), (4, True)])
def test_what_brings_more_is_done(right: int, drafts: bool) -> None:
    choice = DraftOrOverlap()
    trial(choice, right)
    ahead(choice, hidden=0.1)
    assert choice.drafting == drafts


def test_drafts_that_are_no_longer_right_give_way() -> None:
    choice = DraftOrOverlap()
    trial(choice, right=4)
    ahead(choice, hidden=0.25)
    steps = 0
    while choice.drafting:
        draft(choice, right=0)
        steps += 1
    assert 1 < steps < 30


def test_drafting_is_tried_again_from_time_to_time() -> None:
    choice = DraftOrOverlap()
    trial(choice, right=0)
    for _ in range(AHEAD_STEPS):
        ahead(choice, hidden=0.25)
    trial(choice, right=4)
    assert choice.drafting, "the text has begun to repeat itself"


def test_a_prompts_steps_between_say_nothing() -> None:
    choice = DraftOrOverlap()
    trial(choice, right=1)
    gain = choice.gain
    choice.measured(record())
    assert choice.gain == gain and not choice.drafting


def test_where_no_step_can_begin_ahead_nearly_all_draft() -> None:
    choice = DraftOrOverlap()
    trial(choice, right=0)
    drafting = []
    for _ in range(200):
        drafting.append(choice.begin())
        if drafting[-1]:
            draft(choice, right=0)
        else:
            choice.measured(record())
    assert drafting.count(False) < 20 and not all(drafting[-30:]), "it may be possible again"


def test_a_prompt_between_costs_one_step_that_drafts() -> None:
    choice = DraftOrOverlap()
    trial(choice, right=0)
    for _ in range(5):
        assert not choice.begin()  # beside a prompt's chunk: nothing can begin ahead of it
        choice.measured(record())
        assert choice.begin()
        draft(choice, right=0)
        assert not choice.begin() and choice.begin_ahead()
        ahead(choice, hidden=0.5)
