"""A worker's status door is open while the model loads, and tells what is waited for; then it tells of the worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from deploy.runtime.settings import read_settings
from deploy.worker import process
from deploy.worker.process import WorkerProcess
from deploy.worker.status_door import WorkerDoor
from serving.messages import Role
from tests.decode.workers import Worker
from tests.flow.server import free_port


class SlowLoad:
    """A model that loads when the test says so, and then cannot be loaded."""

    begun, go_on = asyncio.Event(), asyncio.Event()

    def __init__(self, *given: object) -> None:
        SlowLoad.begun, SlowLoad.go_on = asyncio.Event(), asyncio.Event()

    async def load(self) -> None:
        self.begun.set()
        await self.go_on.wait()
        raise ValueError("no such model")


async def test_the_door_is_open_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ModelCache", SlowLoad)
    monkeypatch.setattr(process, "use_cores", lambda *given: None)
    port = free_port()
    settings = read_settings({"host": "127.0.0.1", "metrics_port": str(port)})
    running = asyncio.create_task(WorkerProcess(Role.PREFILL, settings).run())
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while not SlowLoad.begun.is_set():
            await asyncio.sleep(0)
        assert (await client.get("/live")).status_code == 200
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "waiting for the model to load"})
        metrics = await client.get("/metrics")
        assert metrics.status_code == 200 and "worker_" not in metrics.text
        assert (await client.get("/audit")).json() == {}
        SlowLoad.go_on.set()
        with pytest.raises(ValueError, match="no such model"):
            await running


async def test_the_door_speaks_of_the_worker_once_it_is_shown() -> None:
    door = WorkerDoor(("name",), "millrace")
    door.waits_for = "the engine to start"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door.app()), base_url="http://door") as client:
        assert (await client.get("/health")).json() == {"status": "waiting for the engine to start"}
        made = Worker(Role.MIXED)
        door.show(made.worker)
        assert (await client.get("/health")).status_code == 200
        assert 'worker_num_requests_running{engine="' in (await client.get("/metrics")).text
        assert (await client.get("/audit")).json()["sequences"] == 0
        made.worker.prefill.draining = True
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})


async def test_each_worker_of_a_process_tells_its_routers_of_prompts_that_come() -> None:
    """Of the one that follows a flip as well; before there are heartbeats nobody is told."""
    made, told = WorkerProcess(Role.MIXED, read_settings({})), list[str]()
    workers = [Worker(Role.MIXED).worker, Worker(Role.PREFILL).worker]
    for worker in workers:
        made._shown(WorkerDoor(("name",), "millrace"), worker)
    workers[0].prefill.arrived()
    made._heartbeats = SimpleNamespace(news=lambda: told.append("news"))  # type: ignore[assignment]
    for worker in workers:
        worker.prefill.arrived()
    assert told == ["news"] * 2
