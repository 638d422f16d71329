"""A paced step lasts as long as its cost says, and what is computed is what the model computes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from scripts import paced
from scripts.paced import LagLog, PacedForward, load_of
from serving.batch.ragged import RaggedBatch
from serving.forward.forward import ByLogits
from serving.forward.layer_events import LayerDone
from serving.model.decoder import Planes
from serving.step_cost import StepCost, StepLoad


class TimedForward(ByLogits):
    """Takes 5 ms of a clock of its own a step; counts the planes it is over."""

    form = "timed"

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def logits(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        self.now += 0.005
        return torch.zeros(len(batch.logits_rows), 4)

    def hidden(self, batch: RaggedBatch, layer_done: LayerDone | None) -> Tensor:
        return self.logits(batch, layer_done)

    def over(self, planes: Sequence[Planes]) -> TimedForward:
        return self


def batch() -> RaggedBatch:
    """Three tokens of a prompt from its 16th on, and one that decodes at 9 tokens."""
    return RaggedBatch.build(tokens=[[1, 2, 3], [4]], starts=[16, 8], block_tables=[[0, 1], [2]], block_size=16)


def test_a_step_lasts_as_its_cost_says_or_as_long_as_it_takes() -> None:
    assert load_of(batch()) == StepLoad.of(16, 3) + StepLoad.of(8, 1)
    inner = TimedForward()
    cost = StepCost(fixed=0.01, token=0.001, sequence=0.002)
    for one in (made := PacedForward(inner, cost, lambda: inner.now, inner.slept.append), made.over(())):
        one.greedy(batch(), None)
        one.logits(batch(), None)
        one.hidden(batch(), None)
        one.greedy_and_logits(batch(), None, [0])
    assert inner.slept == pytest.approx([0.01 + 0.004 + 0.004 - 0.005] * 8)
    PacedForward(inner, StepCost(fixed=0.001, token=0.0), lambda: inner.now, inner.slept.append).logits(batch(), None)
    assert inner.slept[-1] == 0.0


def test_what_steps_lasted_longer_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both where the machine wakes a worker late and where the model took too long."""
    inner = TimedForward()

    def oversleep(seconds: float) -> None:
        inner.now += seconds + 0.002

    log = LagLog(tmp_path / "lags.jsonl", lambda: inner.now)
    made = PacedForward(inner, StepCost(fixed=0.01, token=0.0), lambda: inner.now, oversleep, log).over(())
    for _ in range(100):
        made.logits(batch(), None)
    (line,) = map(json.loads, log.file.read_text().splitlines())
    assert line["steps"] == 84 and line["at"] == pytest.approx(84 * 0.012)
    assert (line["paced"], line["late"]) == (pytest.approx(0.84), pytest.approx(84 * 0.002))
    assert line["worst"] == pytest.approx(0.002)
    slow = LagLog(tmp_path / "slow.jsonl", iter([0.0, 2.0]).__next__)
    PacedForward(inner, StepCost(fixed=0.001, token=0.0), lambda: inner.now, lambda _: None, slow).logits(batch(), None)
    assert json.loads(slow.file.read_text())["late"] == pytest.approx(0.004)


def test_a_worker_writes_to_the_folder_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "forward_of", lambda *_: TimedForward())
    cost, given = StepCost(fixed=0.01, token=0.0), cast(Any, None)
    monkeypatch.delenv(paced.LAGS, raising=False)
    assert paced.paced_forward(cost, given, given, given, 1).log is None
    monkeypatch.setenv(paced.LAGS, str(tmp_path))
    log = paced.paced_forward(cost, given, given, given, 1).log
    assert log is not None and log.file == tmp_path / f"{os.getpid()}.jsonl"


def test_a_server_of_one_process_is_paced_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    async def served(_: object, make_forward: object) -> int:
        made.append(make_forward)
        return 3

    monkeypatch.setenv(paced.PACE, '{"fixed": 0.01, "token": 0.001}')
    monkeypatch.setattr(paced, "serve_embedded", served)
    for name in ("setup_logging", "leave_at_once_on_signals"):
        monkeypatch.setattr(paced, name, lambda *_: None)
    assert paced.main(["serve", "some"]) == 3
    (make,) = made
    assert isinstance(make, partial) and make.func is paced.paced_forward
    assert make.args == (StepCost(fixed=0.01, token=0.001),)
