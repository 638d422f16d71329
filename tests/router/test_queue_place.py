"""A prompt's place in a worker's queue is what the formulas say of each prompt that waits there."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from router.calibration import Drift
from router.candidate import AGE, UNHURRIED, QueuedPrompt
from router.predict import QueuePlace
from tests.router.costed import COST, worker
from tests.router.plain_queue import queue_seconds, queued_lost

NOW = 100.0
HALVES = st.integers(-40, 40).map(lambda n: n / 2)  # seconds, so that some are equal
DUES = st.one_of(HALVES.map(lambda left: NOW + left), st.just(inf))
QUEUED = st.builds(
    QueuedPrompt,
    st.sampled_from([-100, 0, 100]),
    DUES,
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.5, UNHURRIED + 1, 1.5 * AGE]).map(lambda waited: NOW - waited),
    st.sampled_from([1.0, 0.5, 0.0]),
)
NEW = st.tuples(st.sampled_from([-100, 0, 100]), DUES, st.sampled_from([0.0, 0.5, 2.0]))
IN_TIME_BY_NOTHING = QueuedPrompt(0, NOW + 1.0, 1.0, NOW)
OVERDUE = QueuedPrompt(0, inf, 1.0, NOW - UNHURRIED - 1)
LATER = QueuedPrompt(100, NOW + 2.0, 1.0, NOW)
SHARING = QueuedPrompt(0, NOW + 1.0, 1.0, NOW, 0.5)


@given(
    st.lists(QUEUED, max_size=6),
    NEW.map(lambda new: QueuedPrompt(*new)),
    st.floats(0.0, 30.0),
    st.booleans(),
    st.floats(-1.0, 1.0),
)
@example([IN_TIME_BY_NOTHING], QueuedPrompt(0, NOW + 1.0, 0.5), 4.0, False, 0.0)
@example([OVERDUE, LATER], QueuedPrompt(-100, inf, 0.5), 4.0, False, 0.0)
@example([SHARING, LATER], QueuedPrompt(-100, NOW + 9.0, 0.5), 4.0, True, 0.0)
@example([SHARING, LATER], QueuedPrompt(0, NOW + 9.0, 0.5), 4.0, True, 0.0)
@example([LATER, LATER._replace(seconds=0.5)], QueuedPrompt(0, NOW + 9.0, 0.5), 4.0, True, 0.0)
@example([LATER._replace(seconds=3.0), LATER], QueuedPrompt(0, NOW + 9.0, 0.5), 4.0, True, 0.0)
@example([], QueuedPrompt(0, inf, inf), 4.0, True, 0.0)
def test_it_is_that_of_the_formulas(
    queued: list[QueuedPrompt], prompt: QueuedPrompt, waits: float, strangers: bool, mean: float
) -> None:
    there = worker("w", queued=queued, waiting_seconds=waits, waiting=9 if strangers else 0)
    there = replace(there, made_at=NOW)
    assert there.strangers is (strangers and sum(each.at is not None for each in queued) < 9)
    drift = Drift(mean=mean, variance=0.3)
    place = QueuePlace(there, COST, prompt.priority, prompt.due, drift, NOW)
    for seconds in (prompt.seconds, 2.0 * prompt.seconds):  # one place for the prompt and for a copy of its KV
        asked = prompt._replace(seconds=seconds)
        assert place.queue_seconds(seconds) == queue_seconds(there, COST, asked, NOW)
        assert place.queued_lost(seconds) == queued_lost(there, COST, asked, drift, NOW)
