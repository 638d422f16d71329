"""Clients of a worker that is measured ask it once free memory has been reported, and not before."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts import served_balance, served_clients, spinning_steps
from scripts.served_clients import WorkerBehindGrpc, served_apart
from scripts.served_group import Steps, Text
from scripts.slow_spells import SlowSpells
from serving.loader.loading import LoadedModel, load
from serving.messages import WorkerStatus
from serving.rank_group.leader import SpreadModel
from tests.tiny import tiny_llama

MOST = 60.0  # seconds until somebody has asked


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr("deploy.worker.step_costs.cache_folder", lambda: tmp_path)
    return load(tiny_llama(tmp_path / "tiny"), "float32")


async def test_nobody_hears_of_it_before_it_becomes_known(model: LoadedModel) -> None:
    ours, theirs = multiprocessing.Pipe()
    cluster = WorkerBehindGrpc(model, 1, theirs)
    try:
        await cluster.start()
        await asyncio.sleep(2 * cluster.heartbeat_interval)
        assert not ours.poll(), "it beats all the time"
        cluster.become_known()
        assert isinstance(ours.recv(), WorkerStatus)
    finally:
        await cluster.stop()


async def test_it_becomes_known_once_free_memory_has_been_reported(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, known = list[str](), WorkerBehindGrpc.become_known

    def become_known(cluster: WorkerBehindGrpc) -> None:
        found.append("known")
        known(cluster)

    async def reported(_say: Any) -> None:
        await asyncio.sleep(0.1)
        found.append("reported")

    monkeypatch.setattr(WorkerBehindGrpc, "become_known", become_known)
    monkeypatch.setattr(served_clients, "all_reported", reported)
    monkeypatch.setattr(served_clients, "Steps", lambda spread: Steps(None))
    async with served_apart(cast("SpreadModel", model), 1, [[(5, 6, 7)]], MOST) as (steps, asked):
        until = time.monotonic() + MOST
        while not steps.found and time.monotonic() < until:
            await asyncio.sleep(0.01)
        asked.cancel()
    assert found == ["reported", "known"]
    assert steps.found, "nobody has asked it"


def test_steps_that_only_compute_wait_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = list[str]()

    async def reported(_say: Any) -> None:
        found.append("reported")

    def spinning(*_: object) -> list[list[float]]:
        found.append("measured")
        return [[0.1, 0.2, 0.3]]

    monkeypatch.setattr(spinning_steps, "all_reported", reported)
    monkeypatch.setattr(spinning_steps, "spinning", spinning)
    monkeypatch.setattr("sys.argv", ["spinning_steps"])
    spinning_steps.main()
    assert found == ["reported", "measured"]
    assert "free memory was reported to" in capsys.readouterr().out.splitlines()[-1]


async def test_what_is_told_of_a_run_is_of_its_measured_part(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = SlowSpells()
    monkeypatch.setattr(SlowSpells, "__enter__", lambda slow: entered)
    monkeypatch.setattr(SlowSpells, "__exit__", lambda *_: None)
    counts = iter([70, 73])
    monkeypatch.setattr(served_balance, "reports", lambda: next(counts))
    monkeypatch.setattr(served_balance, "told_since", lambda before: f"{next(counts) - before} times")
    monkeypatch.setattr(served_balance, "step_table", lambda steps, slow: ["the table"])

    @asynccontextmanager
    async def served(*_: object) -> AsyncIterator[tuple[SimpleNamespace, asyncio.Future[list[Text]]]]:
        texts: asyncio.Future[list[Text]] = asyncio.get_running_loop().create_future()
        texts.set_result([Text((1,), (2,))])
        yield SimpleNamespace(found=[]), texts

    monkeypatch.setattr(served_balance, "served_apart", served)
    spread = SimpleNamespace(ranks=SimpleNamespace(balancing=None))
    began = time.monotonic()
    told, texts = await served_balance.under_load(cast("SpreadModel", spread), 1, 1.0)
    assert told.splitlines() == ["the table", "slow spells: 0 looks, 0 ms on all cores", "3 times"]
    assert texts == [Text((1,), (2,))]
    assert entered.since >= began
