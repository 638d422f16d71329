"""Fixtures: a scripted server in this loop, and one in a thread for tests of the whole command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest

from tests.bench.scripted import Script, ScriptedServer, scripted_server


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """An obedient server; change its `script` before the first request."""
    async with scripted_server() as running:
        yield running


@contextmanager
def threaded_server(script: Script | None = None) -> Iterator[ScriptedServer]:
    """A server on a loop of its own, for what runs its own loop in the main thread."""
    ready: list[ScriptedServer] = []
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with AsyncExitStack() as stack:
            ready.append(await stack.enter_async_context(scripted_server(script)))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield ready[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
