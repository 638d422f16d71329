"""A worker that is measured is heard of once it may be asked, and not before."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path

import pytest

from scripts.served_clients import WorkerBehindGrpc
from serving.loader.loading import load
from serving.messages import WorkerStatus
from tests.tiny import tiny_llama


async def test_nobody_hears_of_it_until_free_memory_has_been_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.worker.step_costs.cache_folder", lambda: tmp_path)
    model = load(tiny_llama(tmp_path / "tiny"), "float32")
    ours, theirs = multiprocessing.Pipe()
    cluster = WorkerBehindGrpc(model, 1, theirs)
    try:
        await cluster.start()
        await asyncio.sleep(2 * cluster.heartbeat_interval)
        assert not ours.poll(), "it beats all the time"
        cluster.become_known()
        assert ours.poll()
        assert isinstance(ours.recv(), WorkerStatus)
    finally:
        await cluster.stop()
