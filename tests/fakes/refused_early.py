"""Streams that are refused while their first message is on its way: gRPC then hides what the server said."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc.aio import _call

from serving.rpc import server

HEARD = 0.2  # seconds after which the client's process has the refusal, though its event loop has not seen it
KEY = "key of who is not here"


@asynccontextmanager
async def refusing_early(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of a server with a key, in a thread; meanwhile streams of this process write late."""
    original = _call.StreamStreamCall._write

    async def late(call: _call.StreamStreamCall, request: object) -> None:
        await call.wait_for_connection()
        time.sleep(HEARD)  # noqa: ASYNC251 - the event loop stands still, the library's threads do not
        await original(call, request)

    monkeypatch.setattr(_call.StreamStreamCall, "_write", late)
    loop, ports, over = asyncio.new_event_loop(), [0], asyncio.Event()
    listening = threading.Event()

    async def serve() -> None:
        guarded = server(KEY)
        ports[0] = guarded.add_insecure_port("127.0.0.1:0")
        await guarded.start()
        listening.set()
        await over.wait()
        await guarded.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        await asyncio.to_thread(listening.wait, 60)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(over.set)
        await asyncio.to_thread(thread.join)
        loop.close()
