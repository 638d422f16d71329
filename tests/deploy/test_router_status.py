"""A router's status port: what answers probes where clients of its API have to show a certificate."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

import httpx
import pytest

from deploy.image import health
from deploy.runtime.settings import read_settings
from deploy.serve import _run
from tests.flow.ports import free_port


class Front:
    """Of a router: serves until the test says otherwise."""

    def __init__(self) -> None:
        self.well, self.over, self.up = True, asyncio.Event(), asyncio.Event()

    def health(self) -> tuple[bool, str]:
        return self.well, "ok" if self.well else "draining"

    def metrics_text(self) -> bytes:
        return b"millrace:figure 1\n"

    async def run(self) -> None:
        self.up.set()
        await self.over.wait()


async def test_the_health_check_asks_beside_an_api_that_wants_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    front: Any = Front()
    port = free_port()
    settings = read_settings({"metrics_port": str(port), "ssl_certfile": "a", "ssl_cert_reqs": "2", "api_key": "k"})
    monkeypatch.setenv("MILLRACE_METRICS_PORT", str(port))
    monkeypatch.setenv("MILLRACE_PORT", "1")
    running = asyncio.create_task(_run(front, settings))
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        await front.up.wait()
        assert (await client.get("/metrics")).text == front.metrics_text().decode()
        assert (await client.get("/audit")).status_code == 404, "which tells of all tenants, and asks for a key"
        assert await asyncio.to_thread(health.main) == 0
        front.well = False
        assert await asyncio.to_thread(health.main) == 1
        assert (await client.get("/live")).status_code == 200
        front.over.set()
        await running
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(timeout=60) as client:
            await client.get(f"http://127.0.0.1:{port}/live")


async def test_without_the_flag_there_is_none() -> None:
    front: Any = Front()
    front.over.set()
    settings = read_settings({})
    assert settings.cluster == dataclasses.replace(settings.cluster, metrics_port=None)
    await _run(front, settings)


async def test_a_port_that_is_taken_is_told_of_by_its_own_flag() -> None:
    front: Any = Front()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = read_settings({"metrics_port": str(taken.getsockname()[1])})
        with pytest.raises(ValueError, match="choose another --host or --metrics-port"):
            await _run(front, settings)
