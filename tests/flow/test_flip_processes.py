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
TRIES = 4


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


class Streams:
    """Greedy streams, by the number of their prompt."""

    def __init__(self, client: httpx.AsyncClient, seed: int):
        self._client = client
        self._prompts = prompts(60, shortest=20, longest=100, seed=seed)
        self.asked: list[asyncio.Task[list[int]]] = []

    def add(self, count: int, tokens: int) -> None:
        new = self._prompts[len(self.asked) : len(self.asked) + count]
        self.asked += [asyncio.create_task(stream(self._client, prompt, tokens, None)) for prompt in new]

    async def until_decoding(self, server: MillraceServer, name: str, tokens: int) -> None:
        """Some decode there. Where all have ended before that was told, more are added."""
        async with asyncio.timeout(60):
            while not server.metric("worker_num_requests_running", engine=name):
                if all(task.done() for task in self.asked):
                    self.add(6, tokens)
                await asyncio.sleep(0.02)

    async def whole(self, server: MillraceServer, path: Path) -> None:
        """All have ended, each with its text, and nothing is left."""
        for prompt, task in zip(self._prompts, self.asked, strict=False):
            assert is_greedy_tiny(path, prompt, await task)
        await asyncio.to_thread(server.wait_idle)
        assert server.metric("request_failure_total") == 0


async def until(actuator: RouterActuator, name: str, wanted: tuple[Role, str] | None) -> None:
    """The worker is of this role and state; None: there is no such worker."""
    async with asyncio.timeout(60):
        while (await roles(actuator)).get(name) != wanted:
            await asyncio.sleep(0.05)


async def no_longer(actuator: RouterActuator, name: str, known: tuple[Role, str]) -> None:
    """A router knows a worker that is killed as it was until its connections end."""
    async with asyncio.timeout(60):
        while (await roles(actuator)).get(name) == known:
            await asyncio.sleep(0.05)


async def roles(actuator: RouterActuator) -> dict[str, tuple[Role, str]]:
    return {each.worker_id: (each.role, each.state) for each in await actuator.workers()}


async def test_streams_outlast_a_flip_and_the_way_back(
    server: MillraceServer, actuator: RouterActuator, tiny_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        streams = Streams(client, seed=61)
        streams.add(6, 250)
        pid = server.worker_pid("decode-1")
        await streams.until_decoding(server, "decode-1", 250)
        flip = asyncio.create_task(actuator.flip("decode-1", Role.PREFILL))
        streams.add(4, 50)
        await flip
        assert (await roles(actuator))["decode-1"] == (Role.PREFILL, "ready")
        assert server.metric("role_flips_total", engine="decode-1") == 1
        assert server.metric("generation_workers", role="prefill") == 2
        streams.add(4, 50)
        await actuator.flip("decode-1", Role.DECODE)
        assert (await roles(actuator))["decode-1"] == (Role.DECODE, "ready")
        assert server.metric("generation_workers", role="decode") == 2
        assert server.worker_pid("decode-1") == pid, "the model was loaded once"
        await streams.whole(server, tiny_path)


async def kill_in_a_flip(server: MillraceServer, actuator: RouterActuator, streams: Streams) -> BaseException | None:
    """What is told of the flip; None where it was over before."""
    await streams.until_decoding(server, "decode-1", 400)
    flip = asyncio.create_task(actuator.flip("decode-1", Role.PREFILL))
    while not (flip.done() or server.metric("worker_draining", engine="decode-1")):
        await asyncio.sleep(0.01)
    server.signal_worker("decode-1", signal.SIGKILL)
    [told] = await asyncio.gather(flip, return_exceptions=True)
    return told


async def test_a_worker_that_is_killed_while_it_flips_comes_back_in_its_old_role(
    server: MillraceServer, actuator: RouterActuator, tiny_path: Path
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        streams = Streams(client, seed=62)
        streams.add(6, 400)
        moved = False
        for _ in range(TRIES):
            before = server.metric("replacements_total")
            told = await kill_in_a_flip(server, actuator, streams)
            if told is not None:
                assert isinstance(told, ActuatorError) and "decode-1 did not flip to prefill" in str(told)
                await until(actuator, "decode-1", (Role.DECODE, "ready"))
                moved = server.metric("replacements_total") > before
                if moved:
                    break
                continue  # what it decoded was over before the kill
            flipped = (Role.PREFILL, "ready")  # it was killed when it had
            await no_longer(actuator, "decode-1", flipped)
            await until(actuator, "decode-1", flipped)
            await actuator.flip("decode-1", Role.DECODE)
        assert moved, "it was killed in no flip while it decoded"
        await streams.whole(server, tiny_path)


async def test_workers_come_and_go_as_they_are_asked_for(
    server: MillraceServer, actuator: RouterActuator, tiny_path: Path
) -> None:
    await actuator.add(Role.DECODE)
    assert (await roles(actuator))["decode-2"] == (Role.DECODE, "starting")
    await until(actuator, "decode-2", (Role.DECODE, "ready"))
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        streams = Streams(client, seed=63)
        streams.add(6, 400)
        await streams.until_decoding(server, "decode-2", 400)
        await actuator.drain("decode-2")
        await until(actuator, "decode-2", None)
        await streams.whole(server, tiny_path)
    with pytest.raises(ActuatorError, match="prefill-0 stays prefill"):
        await actuator.drain("prefill-0")
