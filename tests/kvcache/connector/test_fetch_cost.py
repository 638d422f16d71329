"""Fetch or compute: from what both have taken so far."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.connector.fetch_cost import PROBE_EVERY, FetchCost
from serving.engine.plan import StepRecord
from serving.step_cost import StepLoad


def step(tokens: int, seconds: float) -> StepRecord:
    return StepRecord(
        began=0.0,
        load=StepLoad.of(0, tokens),
        schedule_seconds=0.0,
        batch_seconds=0.0,
        forward_seconds=seconds,
        sample_seconds=0.0,
        step_seconds=seconds,
    )


def measured(token_seconds: float, byte_seconds: float, answer: float = 0.0) -> FetchCost:
    pace = FetchCost()
    for _ in range(100):
        pace.stepped(step(100, 100 * token_seconds))
        pace.answered(answer)
        pace.fetched(1000, 1.0)
        pace.waited(1000, 1000 * byte_seconds)
    return pace


def test_unmeasured_it_is_worth_trying() -> None:
    pace = FetchCost()
    assert pace.pays(1, 1 << 30)
    pace.waited(1000, 1.0)
    assert pace.pays(1, 1 << 30)


@given(
    st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7), st.floats(0, 0.1), st.integers(1, 10_000), st.integers(1, 1 << 30)
)
def test_the_quicker_one_is_chosen(
    token_seconds: float, byte_seconds: float, answer: float, tokens: int, size: int
) -> None:
    fetching, computing = answer + size * byte_seconds, tokens * token_seconds
    pays = measured(token_seconds, byte_seconds, answer).pays(tokens, size)
    if fetching < 0.99 * computing:
        assert pays
    if fetching > 1.01 * computing:
        assert not pays


def test_what_passes_while_the_prompt_is_computed_costs_it_nothing() -> None:
    pace = measured(1e-4, 1e-9)
    for _ in range(100):
        pace.fetched(1000, 1000.0)
    assert pace.pays(1000, 10_000_000)


def test_decode_steps_say_nothing_of_prompts() -> None:
    pace = measured(1e-4, 1e-9)
    for _ in range(100):
        pace.stepped(step(4, 1.0))
    assert pace.token_seconds is not None and abs(pace.token_seconds - 1e-4) < 1e-6


def test_a_slow_pool_is_tried_again_now_and_then() -> None:
    pace = measured(1e-6, 1e-6)
    answers = [pace.pays(10, 1000) for _ in range(3 * PROBE_EVERY)]
    assert answers.count(True) == 3
