"""The share of a worker's time that goes to prompts: of all of it, since that is what a sequence beside them sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.plan import StepRecord
from serving.engine.step_fit import StepFit
from serving.engine.step_meter import SHARE_SECONDS, StepMeter
from serving.engine.step_prior import UNKNOWN
from serving.step_cost import StepLoad


def stepped(meter: StepMeter, began: float, seconds: float, *, prompts: bool) -> float:
    """When it ended."""
    meter.stepped(
        StepRecord(
            began=began,
            load=StepLoad.of(0, 9),
            prompt_tokens=9 if prompts else 0,
            schedule_seconds=0.0,
            batch_seconds=0.0,
            forward_seconds=0.0,
            sample_seconds=0.0,
            step_seconds=seconds,
            cadence_seconds=seconds,
        )
    )
    return began + seconds


@given(prompt=st.floats(0.01, 0.3), decodes=st.integers(0, 20), idle=st.floats(0.0, 1.0))
def test_it_is_the_share_of_all_time_of_a_regular_load(prompt: float, decodes: int, idle: float) -> None:
    meter, now, period = StepMeter(StepFit(UNKNOWN)), 0.0, prompt + 0.01 * decodes + idle
    while now < 8 * SHARE_SECONDS:
        now = stepped(meter, now, prompt, prompts=True)
        for _ in range(decodes):
            now = stepped(meter, now, 0.01, prompts=False)
        now += idle
    assert meter.prompt_share(now) == pytest.approx(prompt / period, abs=0.08)


def test_an_idle_worker_forgets_its_prompts() -> None:
    meter = StepMeter(StepFit(UNKNOWN))
    now = stepped(meter, 0.0, 100.0, prompts=True)
    assert meter.prompt_share(now) == pytest.approx(1.0, abs=0.01)
    assert meter.prompt_share(now + 7.0) == pytest.approx(0.5, abs=0.01)
    assert meter.prompt_share(now + 200.0) < 0.01
    stepped(meter, now + 200.0, 0.01, prompts=False)
    assert meter.prompt_share(now + 200.0) < 0.01


def test_before_any_step_there_is_none() -> None:
    assert StepMeter(StepFit(UNKNOWN)).prompt_share(5.0) == 0.0
