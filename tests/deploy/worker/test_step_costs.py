"""What a worker has learned is there after a restart, and nothing else that lies in its file is believed."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.worker import step_costs
from deploy.worker.step_costs import WORTH_KEEPING, StepCostFile, StepCostKeeper, step_cost_file
from serving.engine.step_fit import StepFit
from serving.engine.step_meter import StepMeter
from serving.engine.step_prior import UNKNOWN
from serving.messages import Role
from serving.step_cost import StepCost, StepLoad

COST = StepCost(fixed=1e-3, token=2e-4, pair=0.0, sequence=3e-5, context=1e-7, error=0.1, samples=500)
KIND = {"fingerprint": "abc", "form": "cpu"}


@pytest.fixture
def file(tmp_path: Path) -> StepCostFile:
    return StepCostFile(tmp_path / "folder" / "step-cost.json", KIND)


def test_what_is_written_is_read(file: StepCostFile, caplog: pytest.LogCaptureFixture) -> None:
    assert file.read() is None and not caplog.records, "the first start has nothing to read, and says nothing"
    file.write(COST)
    file.write(replace(COST, fixed=2e-3))
    assert file.read() == replace(COST, fixed=2e-3)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name], "nothing else is left there"


def content(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "kind": KIND, "cost": asdict(COST)} | changes


NUMBERS = st.floats() | st.integers() | st.sampled_from([0, 1, True, 10**400, 1e300, "1", None])
COST_TABLES = st.fixed_dictionaries({name: NUMBERS | st.floats(0, 1) for name in asdict(COST)})
CONTENTS = st.fixed_dictionaries(
    {"cost": NUMBERS | COST_TABLES}, optional={"kind": NUMBERS, "format": NUMBERS, "more": NUMBERS}
)


def as_json(found: dict[str, Any]) -> bytes:
    return json.dumps({"format": 1, "kind": KIND} | found).encode()


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": 1' + b"1" * 5000 + b"}",
        json.dumps(asdict(COST)).encode()[:-9],
        *(
            json.dumps(found).encode()
            for found in (
                content(format=2),
                content(kind={**KIND, "form": "gpu"}),
                content(cost=None),
                content(cost={"fixed": 1.0}),
                content(cost={**asdict(COST), "more": 1.0}),
                content(cost={**asdict(COST), "token": -1.0}),
                content(cost={**asdict(COST), "token": float("nan")}),
                content(cost={**asdict(COST), "token": float("inf")}),
                content(cost={**asdict(COST), "token": 10**400}),
                content(cost={**asdict(COST), "pair": 1e300}),
                content(cost={**asdict(COST), "error": -0.1}),
                content(cost={**asdict(COST), "samples": 2**32}),
                content(cost={**asdict(COST), "samples": True}),
                content(cost={**asdict(COST), "token": "1"}),
                content(cost={**asdict(COST), "token": True}),
                content(cost={**asdict(COST), "samples": 0}),
                content(cost={**asdict(COST), "samples": 1.5}),
                content(cost={**asdict(COST), "fixed": 0.0, "token": 0.0}),
            )
        ),
    ],
)
def test_what_is_no_such_cost_is_ignored_with_a_word(
    file: StepCostFile, written: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(written)
    assert file.read() is None
    assert len(caplog.records) == 1 and str(file.path) in caplog.text


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("step-costs")


@settings(max_examples=200)
@given(written=st.binary(max_size=60) | CONTENTS.map(as_json), left=st.none() | st.integers(0, 200))
def test_whatever_lies_there_is_a_possible_cost_or_none(one_folder: Path, written: bytes, left: int | None) -> None:
    file = StepCostFile(one_folder / "step-cost.json", KIND)
    file.path.write_bytes(written[:left])
    cost = file.read()
    assert cost is None or (cost.possible and 0 < cost.samples < 2**32)


def test_of_a_write_that_fails_nothing_stays(
    file: StepCostFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(content: object, part: IO[str]) -> None:
        part.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    file.write(COST)
    monkeypatch.setattr(json, "dump", full)
    file.write(replace(COST, fixed=2e-3))
    assert "No space left" in caplog.text and file.read() == COST
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_a_file_that_is_a_folder_is_ignored(file: StepCostFile, caplog: pytest.LogCaptureFixture) -> None:
    file.path.mkdir(parents=True)
    assert file.read() is None
    file.write(COST)
    assert len(caplog.records) == 2
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_a_kind_is_all_that_the_cost_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plain: dict[str, Any] = {
        "fingerprint": "model", "form": "cpu", "role": Role.MIXED, "threads": 2, "device": "cpu"
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {},
        {"fingerprint": "other"},
        {"form": "torch"},
        {"role": Role.DECODE},
        {"threads": 4},
        {"device": "cuda"},
    ]
    files = [step_cost_file(**plain | change) for change in changes]
    monkeypatch.setattr(step_costs, "cpu_name", lambda: "another x2")
    files.append(step_cost_file(**plain))
    assert len({found.path for found in files}) == len(files)
    assert {found.path.parent for found in files} == {tmp_path / "millrace"}
    assert step_cost_file(**plain) == files[-1]


def keeper(file: StepCostFile | None, steps: int = WORTH_KEEPING) -> StepCostKeeper:
    fit = StepFit(UNKNOWN)
    for _ in range(steps):
        fit.observe(StepLoad.of(0, 10), 1.0, prompts=True)
    fit.refit(0.0)
    return StepCostKeeper(StepMeter(fit), file)


async def test_a_worker_saves_when_it_stops(file: StepCostFile) -> None:
    kept = keeper(file)
    kept.start()
    assert file.read() is None
    await kept.stop()
    assert file.read() == kept.meter.cost()


async def test_it_saves_now_and_then_and_only_what_is_new(file: StepCostFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "SAVE_SECONDS", 0.001)
    written: list[StepCost] = []
    monkeypatch.setattr(StepCostFile, "write", lambda self, cost: written.append(cost))
    kept = keeper(file)
    kept.start()
    while not written:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert len(written) == 1
    kept.meter.fit.observe(StepLoad.of(0, 10), 3.0, prompts=True)
    kept.meter.fit.refit(9.0)
    while len(written) < 2:
        await asyncio.sleep(0.001)
    await kept.stop()
    assert len(written) == 2 and written[0] != written[1]


async def test_a_save_that_breaks_is_told_counted_and_tried_again(
    file: StepCostFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_costs, "SAVE_SECONDS", 0.001)
    tried: list[StepCost] = []

    def write(self: StepCostFile, cost: StepCost) -> None:
        tried.append(cost)
        if len(tried) == 1:
            raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(StepCostFile, "write", write)
    kept, restarts = keeper(file), Counter[str]()
    kept.start(restarts)
    while kept._kept is None:  # until it is known that the second was written
        await asyncio.sleep(0.001)
    await kept.stop()
    assert tried == [kept.meter.cost()] * 2 and restarts == {"step-costs": 1} and "a mistake of ours" in caplog.text


@pytest.mark.parametrize("newer", [True, False], ids=["with a newer cost", "with nothing newer"])
async def test_what_is_being_written_as_it_stops_does_not_win_and_is_written_once(
    file: StepCostFile, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    monkeypatch.setattr(step_costs, "SAVE_SECONDS", 0.001)
    begun, released, written = threading.Event(), threading.Event(), list[StepCost]()

    def write(self: StepCostFile, cost: StepCost) -> None:
        if not begun.is_set():
            begun.set()
            released.wait(10)
        written.append(cost)

    monkeypatch.setattr(StepCostFile, "write", write)
    kept = keeper(file)
    kept.start()
    await asyncio.to_thread(begun.wait, 10)
    if newer:
        kept.meter.fit.observe(StepLoad.of(0, 10), 3.0, prompts=True)
        kept.meter.fit.refit(9.0)
    stopping = asyncio.create_task(kept.stop())
    await asyncio.sleep(0.02)
    assert not stopping.done()
    released.set()
    await stopping
    assert len(written) == 1 + newer and written[-1] == kept.meter.cost()


async def test_a_worker_that_has_hardly_worked_leaves_the_file_alone(file: StepCostFile) -> None:
    kept = keeper(file, WORTH_KEEPING - 1)
    kept.start()
    await kept.stop()
    assert file.read() is None


async def test_without_a_file_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    kept = keeper(None)
    kept.start()
    await kept.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
