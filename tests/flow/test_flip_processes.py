"""A worker's process changes its role under streams, and is killed half-way: no request fails, every text is whole."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from deploy.autoscaler.actuator import ActuatorError
from deploy.autoscaler.by_router import RouterActuator
from serving.messages import Role
from tests.flow.ports import free_port
from tests.flow.reference import is_greedy_tiny, prompts
from tests.flow.server import MillraceServer
from tests.flow.test_hangup import stream

pytestmark = pytest.mark.slow

KEY = "cluster-key-of-the-tests"
WORKERS = ("prefill-0", "decode-0", "decode-1")
PORT = free_port()


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[MillraceServer]:
    flags = (str(tiny_path), "--dtype", "float32", "--served-model-name", "tiny", "--prefill", "1", "--decode", "2")
    flags += ("--kernels", "torch", "--num-kv-blocks", "1024", "--heartbeat-interval", "0.1")  # slow enough
    flags += ("--heartbeat-timeout", "10", "--grpc-port", str(PORT))
    with MillraceServer(*flags, workers=WORKERS, environ={"MILLRACE_CLUSTER_KEY": KEY}) as started:
        yield started


@pytest.fixture
async def actuator(server: MillraceServer) -> AsyncIterator[RouterActuator]:
    made = RouterActuator(f"127.0.0.1:{PORT}", KEY, "tests", patience=60.0)
    yield made
    await made.close()


async def until_decoding(server: MillraceServer, name: str) -> None:
    while not server.metric("worker_num_requests_running", engine=name):
        await asyncio.sleep(0.02)


async def roles(actuator: RouterActuator) -> dict[str, tuple[Role, str]]:
    return {each.worker_id: (each.role, each.state) for each in await actuator.workers()}


async def whole(server: MillraceServer, path: Path, asking: dict[int, asyncio.Task[list[int]]], seed: int) -> None:
    for number, prompt in enumerate(prompts(len(asking), shortest=20, longest=100, seed=seed)):
        assert is_greedy_tiny(path, prompt, await asking[number])
    await asyncio.to_thread(server.wait_idle)
    assert server.metric("request_failure_total") == 0


async def test_streams_outlast_a_flip_and_the_way_back(
    server: MillraceServer, actuator: RouterActuator, tiny_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = prompts(14, shortest=20, longest=100, seed=61)
        asking = {n: asyncio.create_task(stream(client, asked[n], 250, None)) for n in range(6)}
        pid = server.worker_pid("decode-1")
        await until_decoding(server, "decode-1")
        flip = asyncio.create_task(actuator.flip("decode-1", Role.PREFILL))
        asking |= {n: asyncio.create_task(stream(client, asked[n], 50, None)) for n in range(6, 10)}
        await flip
        assert (await roles(actuator))["decode-1"] == (Role.PREFILL, "ready")
        assert server.metric("role_flips_total", engine="decode-1") == 1
        assert server.metric("generation_workers", role="prefill") == 2
        asking |= {n: asyncio.create_task(stream(client, asked[n], 50, None)) for n in range(10, 14)}
        await actuator.flip("decode-1", Role.DECODE)
        assert (await roles(actuator))["decode-1"] == (Role.DECODE, "ready")
        assert server.metric("generation_workers", role="decode") == 2
        assert server.worker_pid("decode-1") == pid, "the model was loaded once"
        await whole(server, tiny_path, asking, 61)


async def test_a_worker_that_is_killed_while_it_flips_comes_back_in_its_old_role(
    server: MillraceServer, actuator: RouterActuator, tiny_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = prompts(6, shortest=20, longest=100, seed=62)
        asking = {n: asyncio.create_task(stream(client, asked[n], 400, None)) for n in range(6)}
        await until_decoding(server, "decode-1")
        flip = asyncio.create_task(actuator.flip("decode-1", Role.PREFILL))
        while not server.metric("worker_draining", engine="decode-1"):
            await asyncio.sleep(0.01)
        server.signal_worker("decode-1", signal.SIGKILL)
        with pytest.raises(ActuatorError, match="decode-1 did not flip to prefill"):
            await flip
        while (await roles(actuator))["decode-1"] != (Role.DECODE, "ready"):
            await asyncio.sleep(0.05)
        assert server.metric("replacements_total") > 0
        await whole(server, tiny_path, asking, 62)


async def test_workers_come_and_go_as_they_are_asked_for(
    server: MillraceServer, actuator: RouterActuator, tiny_path: Path
) -> None:
    await actuator.add(Role.DECODE)
    assert (await roles(actuator))["decode-2"] == (Role.DECODE, "starting")
    while (await roles(actuator))["decode-2"][1] != "ready":
        await asyncio.sleep(0.05)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = prompts(6, shortest=20, longest=100, seed=63)
        asking = {n: asyncio.create_task(stream(client, asked[n], 200, None)) for n in range(6)}
        await until_decoding(server, "decode-2")
        await actuator.drain("decode-2")
        while "decode-2" in await roles(actuator):
            await asyncio.sleep(0.05)
        await whole(server, tiny_path, asking, 63)
    with pytest.raises(ActuatorError, match="prefill-0 stays prefill"):
        await actuator.drain("prefill-0")
