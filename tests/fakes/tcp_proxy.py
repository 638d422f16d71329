"""What the TCP proxies of the tests share: they listen on loopback, forward both ways, and end what they began.

Where a connection leads, and what becomes of the bytes on the way, a subclass says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TcpProxy:
    """`start()` in a running loop; `serve` is called for each connection, and its end is the connection's."""

    def __init__(self) -> None:
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Listen; the address to use instead of the target."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until it ends. OSError ends it too."""
        raise NotImplementedError

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a target, which ends with the proxy. Raises OSError."""
        reader, writer = await asyncio.open_connection(host, port)
        self._writers.add(writer)
        return reader, writer

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        except (OSError, EOFError):
            pass  # an end has gone, and so goes the other
        finally:
            self.close(writer)

    def close(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        self._writers.discard(writer)

    async def stop(self) -> None:
        """End every connection."""
        self._server.close()
        serving, writers = list(self._serving), list(self._writers)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def until_one_ends(*directions: Coroutine[Any, Any, None]) -> None:
    """Forward both ways until one way has ended: then the connection has. Raises what ended it."""
    tasks = [asyncio.ensure_future(each) for each in directions]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
