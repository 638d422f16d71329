"""The measurement of predictions: an engine over a tiny model, and the table of what it was told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.step_prediction import REGIMES, ClosedLoop, Served, Step, table, windows, write_trace
from serving.config import EngineConfig
from serving.engine.plan import StepRecord
from serving.loader.loading import load
from serving.step_cost import StepLoad
from tests.tiny import tiny_llama


def step(at: float, load: StepLoad, prompt_tokens: int, predicted: float) -> Step:
    record = StepRecord(
        began=0.0,
        load=load,
        prompt_tokens=prompt_tokens,
        schedule_seconds=0.0,
        batch_seconds=0.0,
        forward_seconds=0.0,
        sample_seconds=0.0,
        step_seconds=1.0,
        cadence_seconds=1.0,
    )
    return Step(at, record, predicted)


def test_steps_are_told_apart_by_what_they_compute_and_when() -> None:
    decode, prompt = StepLoad.of(20, 1), StepLoad.of(0, 9)
    steps = [step(at, decode, 0, 1.1) for at in (6.0, 7.0, 8.0)] + [step(9.0, decode, 0, 2.0)]
    steps += [step(at, prompt, 9, 0.8) for at in (6.5, 7.5)] + [step(at, prompt + decode, 9, 1.3) for at in (6.2, 7.2)]
    text = table(steps, windows(10.0, 20.0))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[1:] == [
        "settled decodes alone 4 1000.0 10.0 % 100.0 %",
        "settled prompts alone 2 1000.0 20.0 % 20.0 %",
        "settled decodes and prompts 2 1000.0 30.0 % 30.0 %",
        "settled all 8 1000.0 20.0 % 100.0 %",
    ]
    assert [one.regime for one in (steps[0], steps[4], steps[6])] == list(REGIMES)


@pytest.mark.thorough
async def test_a_tiny_model_is_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.step_prediction.CHATS", [ClosedLoop(2, 4, 20, 8, pause=0.01)])
    monkeypatch.setattr("bench.step_prediction.LONG", [ClosedLoop(1, 30, 60, 4)])
    monkeypatch.setattr("bench.step_prediction.CONTEXT", 100)
    served = Served(load(tiny_llama(tmp_path / "tiny"), "float32"), EngineConfig(kernels="torch"))
    changed = await served.serve(1.2)
    assert 0.5 < changed < 1.2 and len(served.steps) > 20
    assert {one.regime for one in served.steps} >= {REGIMES[0], REGIMES[1]}
    assert served.meter.cost().samples > 0 and served.kv.allocator.held == 0
    write_trace(tmp_path / "trace", served.steps, served.costs)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert len(lines) == len(served.steps) + len(served.costs)
