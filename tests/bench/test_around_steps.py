"""What is around the steps of a single request: neither slow steps nor other requests' have a part in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.around_steps import TracedStep, TracedSteps, beside_steps
from bench.deployments import DEPLOYMENTS
from bench.step_traces import logs_of, trace_flags, traced_steps
from deploy.worker.build import trace_writer
from serving.engine.plan import StepRecord
from serving.step_cost import StepCost, StepLoad

COST = StepCost(fixed=0.010, token=0.001)
PROMPT, DECODE = StepLoad(32, 528.0, 1, 32.0), StepLoad(1, 33.0, 1, 33.0)
FRONT = 0.007  # seconds
SIMULATED = {"ttft": 1e3 * COST.seconds(PROMPT), "tpot": 1e3 * COST.seconds(DECODE)}


def lone_request(at: float, slow: float) -> tuple[dict[str, Any], list[TracedStep]]:
    """A request of two tokens, whose steps took `slow` times what the cost says, and its steps."""
    prompt, decode = slow * COST.seconds(PROMPT), slow * COST.seconds(DECODE)
    first = at + FRONT + prompt
    row = {"ttft_ms": 1e3 * (first - at), "tpot_ms": 1e3 * decode, "span": (at, first + decode)}
    steps = [
        TracedStep(began=at + FRONT, seconds=prompt, load=PROMPT, prompts=True),
        TracedStep(began=first, seconds=decode, load=DECODE, prompts=False),
    ]
    return row, steps


@given(slow=st.lists(st.floats(0.3, 30.0), min_size=1, max_size=9))
def test_a_slow_step_is_no_part_of_the_front(slow: list[float]) -> None:
    found = [lone_request(10.0 * number, times) for number, times in enumerate(slow)]
    rows, steps = [row for row, _ in found], [step for _, two in found for step in two]
    workers = [TracedSteps(steps=steps, cost=COST)]
    front, traced = beside_steps(rows, "ttft", workers, SIMULATED["ttft"])
    assert front == pytest.approx(1e3 * FRONT, abs=1e-6) and traced == len(slow)
    commit, _ = beside_steps(rows, "tpot", workers, SIMULATED["tpot"])
    assert commit == pytest.approx(0.0, abs=1e-6), "the end of a handoff that there was none of"


def test_only_steps_of_its_own_kind_and_time_count() -> None:
    row, steps = lone_request(0.0, 2.0)
    beside = [replace(steps[0], began=50.0), replace(steps[0], began=-5.0), replace(steps[0], began=-1e-3)]
    workers = [TracedSteps(steps=[*steps, *beside], cost=COST), TracedSteps(steps=[], cost=COST)]
    front, traced = beside_steps([row], "ttft", workers, SIMULATED["ttft"])
    assert (front, traced) == (pytest.approx(1e3 * FRONT), 1)


def test_requests_whose_steps_were_not_traced_do_not_count_beside_those_that_were() -> None:
    (slow, steps), (fast, _) = lone_request(0.0, 4.0), lone_request(10.0, 1.0)
    workers = [TracedSteps(steps=steps, cost=COST)]
    front, traced = beside_steps([slow, {**fast, "ttft_ms": 900.0}], "ttft", workers, SIMULATED["ttft"])
    assert (front, traced) == (pytest.approx(1e3 * FRONT), 1)


def test_without_a_trace_all_that_is_beyond_the_simulation_counts() -> None:
    rows = [lone_request(0.0, 1.0 + number)[0] for number in range(3)]
    beyond, traced = beside_steps(rows, "ttft", [], SIMULATED["ttft"])
    assert (beyond, traced) == (pytest.approx(median(row["ttft_ms"] for row in rows) - SIMULATED["ttft"]), 0)
    assert beside_steps(rows, "ttft", [], 1e6) == (0.0, 0), "a front is never less than nothing"


def test_the_steps_of_a_worker_are_read_as_it_wrote_them(tmp_path: Path) -> None:
    """With their loads, and without those that computed nothing."""
    chosen, logs = DEPLOYMENTS["split"], logs_of(tmp_path / "found")
    logs.mkdir()
    _, path = trace_flags(logs, chosen)
    record = StepRecord(
        began=5.0,
        load=PROMPT,
        prompt_tokens=32,
        schedule_seconds=0.0,
        batch_seconds=0.0,
        forward_seconds=0.04,
        sample_seconds=0.0,
        step_seconds=0.05,
        cadence_seconds=0.05,
    )
    trace = trace_writer(path, "prefill-0")
    assert trace is not None
    trace.step(record)
    trace.step(replace(record, began=6.0, load=StepLoad(), prompt_tokens=0))
    trace.step(replace(record, began=7.0, load=DECODE, prompt_tokens=0))
    trace.close()
    with (logs / f"{chosen.name}-steps.prefill-0.json").open("a") as file:
        file.write('{"name": "step", "ts": 20')
    prefill, decode = traced_steps(logs, chosen, {"prefill": COST, "decode": COST})
    assert prefill.steps == [
        TracedStep(began=5.0, seconds=pytest.approx(0.05), load=PROMPT, prompts=True),
        TracedStep(began=7.0, seconds=pytest.approx(0.05), load=DECODE, prompts=False),
    ]
    assert not decode.steps, "it has written no trace"
