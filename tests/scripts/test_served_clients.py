"""Clients of a worker that is measured ask it once free memory has been reported, and not before."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any, cast

import pytest

from scripts import served_clients, spinning_steps
from scripts.served_clients import WorkerBehindGrpc, served_apart
from scripts.served_group import Steps
from serving.loader.loading import LoadedModel, load
from serving.messages import WorkerStatus
from serving.rank_group.leader import SpreadModel
from tests.tiny import tiny_llama


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
    prompt = (5, 6, 7)
    async with served_apart(cast("SpreadModel", model), 1, [[prompt]], 3.0) as (steps, asked):
        texts = await asked
    assert steps.found
    assert found == ["reported", "known"]
    assert {text.prompt for text in texts} == {prompt}


def test_steps_that_only_compute_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
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
