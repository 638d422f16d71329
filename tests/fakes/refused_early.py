"""Streams that are refused while their first message is on its way: gRPC then hides what the server said."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from grpc import StatusCode, aio
from grpc.aio import _call

from serving import rpc

HEARD = 0.5  # seconds after which the client's process has the refusal, though its event loop has not seen it
KEY = "key of who is not here"


@dataclass
class RefusesEarly:
    address: str = ""
    hidden: int = 0  # refusals that gRPC has told as internal errors


@asynccontextmanager
async def refusing_early(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RefusesEarly]:
    """A server with a key, in a thread; meanwhile streams of this process write late, and are refused just before."""
    write, refuse, told, connected = _call.StreamStreamCall._write, rpc._refuse, RefusesEarly(), threading.Event()

    async def refuse_connected(requests: object, context: aio.ServicerContext) -> None:
        while not connected.is_set():
            await asyncio.sleep(0.001)
        await refuse(requests, context)

    async def late(call: _call.StreamStreamCall, request: object) -> None:
        await call.wait_for_connection()
        connected.set()
        time.sleep(HEARD)  # noqa: ASYNC251 - the event loop stands still, the library's threads do not
        try:
            await write(call, request)
        except aio.AioRpcError as error:
            told.hidden += error.code() is StatusCode.INTERNAL
            raise

    loop, over, listening = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        guarded = rpc.server(KEY)
        told.address = f"127.0.0.1:{guarded.add_insecure_port('127.0.0.1:0')}"
        await guarded.start()
        listening.set()
        await over.wait()
        await guarded.stop(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert await asyncio.to_thread(listening.wait, 60)
        with monkeypatch.context() as patched:
            patched.setattr(_call.StreamStreamCall, "_write", late)
            patched.setattr(rpc, "_refuse", refuse_connected)
            yield told
    finally:
        loop.call_soon_threadsafe(over.set)
        await asyncio.to_thread(thread.join)
        loop.close()
