"""The steps that a worker computes prompts in: those of the formulas, and kept only where they stay the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.prompt_steps import MOST_KEPT, PromptSteps, prompt_steps
from serving.messages import Role
from serving.step_cost import StepCost, StepLoad
from tests.router.costed import COST, worker
from tests.router.plain_steps import chunk_tokens, held_seconds, pause_seconds

SMALL = st.floats(1e-6, 1e-2)
COSTS = st.builds(
    StepCost, fixed=SMALL, token=SMALL, pair=st.floats(0, 1e-7), sequence=SMALL, context=st.floats(0, 1e-6), error=SMALL
)
OBJECTIVES = st.none() | st.floats(1e-4, 1.0)


@given(st.sampled_from(Role), st.integers(0, 60), COSTS, OBJECTIVES, st.integers(0, 3000), st.integers(1, 3000))
def test_they_are_those_of_the_formulas(
    role: Role, rows: int, cost: StepCost, tpot: float | None, start: int, count: int
) -> None:
    there = worker("w", role, rows=rows)
    steps, beside = PromptSteps(there, cost, tpot), cost.seconds(there.decode_load)
    added = beside - cost.fixed if there.decode_load.sequences else 0.0
    for at in (start, 0):
        chunk = chunk_tokens(there, cost, at, tpot)
        assert steps.chunk(at) == chunk
        assert steps.prompt_seconds(at, at + count) == cost.prompt_seconds(at, at + count, chunk, beside=added)
    first = min(count, chunk_tokens(there, cost, 0, tpot))
    assert steps.beside_seconds(count) == cost.seconds(StepLoad.of(0, first)) - cost.fixed
    assert steps.pause_seconds(beside) == pause_seconds(there, cost, beside, tpot)
    assert steps.held_seconds(beside) == held_seconds(cost, beside, tpot)


def test_a_worker_keeps_those_of_its_own_cost_by_objective() -> None:
    there = worker("w", rows=3)
    kept = prompt_steps(there, COST, 0.05)
    assert prompt_steps(there, COST, 0.05) is kept
    assert prompt_steps(there, COST, None) is not kept
    assert prompt_steps(replace(there), COST, 0.05) is not kept, "it has changed"


def test_a_guess_is_not_kept_for_the_next_who_may_guess_otherwise() -> None:
    there, guess = worker("w", rows=3), replace(COST, fixed=1.0)
    assert prompt_steps(there, guess, 0.05) is not prompt_steps(there, guess, 0.05)
    for cost in (COST, guess, COST):
        assert prompt_steps(there, cost, 0.05).cost is cost


def test_no_more_are_kept_than_a_few_however_many_objectives_requests_state() -> None:
    there = worker("w", rows=3)
    for number in range(1000):
        prompt_steps(there, COST, 0.01 + 1e-6 * number)
    assert len(there.prompt_steps) <= MOST_KEPT
