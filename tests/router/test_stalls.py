"""Stuck engines: found by steps that do not end and by work that no step takes up; long steps that end are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.stalls import StallWatch
from serving.messages import WorkerStatus
from serving.step_cost import StepCost
from tests.router.scripted import make_status


def status(steps: int, stalled: float = 0.0, running: int = 1, **fields: object) -> WorkerStatus:
    counters = {"engine_steps": float(steps)}
    return make_status("w", stalled_seconds=stalled, running=running, counters=counters, **fields)


def test_a_step_that_does_not_end_is_a_stall_and_its_end_is_the_end_of_it() -> None:
    watch = StallWatch(10.0)
    assert [watch.heard(status(5, float(age)), age) for age in range(13)] == [False] * 11 + [True, False]
    assert watch.stuck("w-life")
    watch.heard(status(6), 13.0)
    assert not watch.stuck("w-life")


def test_work_that_no_step_takes_up_is_a_stall() -> None:
    watch = StallWatch(10.0)
    for second in range(10):
        watch.heard(status(5, running=0, waiting=1), float(second))
    assert not watch.stuck("w-life")
    assert watch.heard(status(5, running=0, waiting=1), 10.5)
    assert watch.all_stuck() == {"w-life"}
    watch.heard(status(6, running=0, waiting=1), 11.5)
    assert not watch.stuck("w-life")


@given(st.lists(st.floats(0.1, 100), max_size=20))
def test_a_worker_without_work_is_never_stuck(pauses: list[float]) -> None:
    watch, now = StallWatch(10.0), 0.0
    for pause in pauses:
        now += pause
        watch.heard(status(5, running=0), now)
        assert not watch.stuck("w-life")


def test_a_worker_that_counts_no_steps_is_judged_by_the_step_in_progress_alone() -> None:
    watch = StallWatch(10.0)
    for second in range(100):
        assert not watch.heard(make_status("w", running=1), float(second))
    assert watch.heard(make_status("w", running=1, stalled_seconds=11.0), 101.0)


def test_a_worker_whose_steps_take_long_is_known_by_its_cost() -> None:
    """2,000 tokens at 8 ms each are 16 s."""
    slow = StepCost(fixed=0.01, token=0.008, samples=100)
    watch = StallWatch(10.0)
    fields = {"step_cost": slow, "max_batched_tokens": 2000, "max_model_len": 4000}
    assert not watch.heard(status(5, 16.0, **fields), 16.0)
    assert watch.heard(status(5, 50.0, **fields), 50.0)
    guess = StepCost(fixed=0.01, token=0.008, samples=0)
    assert StallWatch(10.0).bound_of(status(5, step_cost=guess, max_batched_tokens=2000)) == 10.0


def test_a_worker_whose_steps_were_seen_to_take_long_is_given_longer() -> None:
    watch = StallWatch(10.0)
    watch.heard(status(5, 9.0), 9.0)
    watch.heard(status(6, 9.0), 18.0)  # the next long one
    assert not watch.heard(status(6, 25.0), 34.0)
    assert watch.heard(status(6, 28.0), 37.0)


def test_workers_that_are_gone_are_forgotten() -> None:
    watch = StallWatch(10.0)
    watch.heard(status(5, 11.0), 0.0)
    watch.retain({"another"})
    assert not watch.stuck("w-life")


def test_a_stall_that_ended_does_not_let_the_next_one_last_for_ever() -> None:
    watch = StallWatch(10.0)
    watch.heard(status(5, 500.0), 500.0)
    watch.heard(status(6, 0.0), 501.0)
    assert watch.bound_of(status(6)) == 60.0
