"""The reconciler goes on whatever a look at the cluster raises, and the end is told to the deployment all the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from deploy.on_ray import supervisor as module
from deploy.on_ray.cluster import RayDeployment
from deploy.on_ray.supervisor import RaySupervisor


class RayError(Exception):
    """Stands in for the library's."""


class ScriptedDeployment:
    """Looks fail as told, one after the other; those after them do not."""

    def __init__(self, *failures: Exception):
        self.ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError))
        self.failures = list(failures)
        self.looks = 0
        self.stopped: list[float] = []

    def tick(self) -> None:
        self.looks += 1
        if self.failures:
            raise self.failures.pop(0)

    def stop(self, seconds: float) -> None:
        self.stopped.append(seconds)


async def test_a_look_that_fails_is_followed_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.001)
    failures = (RayError("no answer"), ValueError("the name decode-0 is taken"), RuntimeError(), OSError("reset"))
    deployment = ScriptedDeployment(*failures)
    supervisor = RaySupervisor(cast(RayDeployment, deployment))
    supervisor.start()
    async with asyncio.timeout(60):
        while deployment.looks < len(failures) + 3:
            await asyncio.sleep(0)
    await supervisor.stop(3.0)
    assert deployment.stopped == [3.0]
    assert "the name decode-0 is taken" in caplog.text and "RuntimeError" in caplog.text


async def test_a_mistake_of_our_own_does_not_keep_services_from_draining() -> None:
    deployment = ScriptedDeployment(IndexError("ours"))
    supervisor = RaySupervisor(cast(RayDeployment, deployment))
    supervisor.start()
    async with asyncio.timeout(60):
        while not deployment.looks:
            await asyncio.sleep(0)
    with pytest.raises(IndexError):
        await supervisor.stop(3.0)
    assert deployment.stopped == [3.0]
