"""A TCP proxy that may flip one bit of what passes: damage on the wire, without a hook in the program."""

from __future__ import annotations

import asyncio

LARGE = 4096  # bytes read at once from a socket: only KV comes in pieces this large


class FlippingProxy:
    """Forwards connections to host:port; while `armed`, flips one bit in the next large piece and disarms."""

    def __init__(self, target: str):
        self.host, port = target.rsplit(":", 1)
        self.target_port = int(port)
        self.armed = 0
        self.flipped = 0
        self._pipes: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        """Listen; the address to use instead of the target."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self.host, self.target_port)
        pipes = [
            asyncio.create_task(self._pipe(up_reader, writer, harm=False)),
            asyncio.create_task(self._pipe(reader, up_writer, harm=True)),
        ]
        self._pipes += pipes
        self._writers += [up_writer, writer]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe, end in zip(pipes, (up_writer, writer), strict=True):
            pipe.cancel()
            end.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, harm: bool) -> None:
        while data := await reader.read(1 << 16):
            if harm and self.armed and len(data) >= LARGE:
                damaged = bytearray(data)
                damaged[len(data) // 2] ^= 0x10
                data = bytes(damaged)
                self.armed -= 1
                self.flipped += 1
            writer.write(data)
            await writer.drain()

    async def stop(self) -> None:
        """End every connection."""
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
