"""A TCP proxy that may flip one bit of what passes: damage on the wire, without a hook in the program."""

from __future__ import annotations

import asyncio

from tests.fakes.tcp_proxy import TcpProxy, until_one_ends

LARGE = 4096  # bytes read at once from a socket: only KV comes in pieces this large


class FlippingProxy(TcpProxy):
    """Forwards connections to host:port; while `armed`, flips one bit in the next large piece and disarms."""

    def __init__(self, target: str):
        super().__init__()
        self.host, port = target.rsplit(":", 1)
        self.target_port = int(port)
        self.armed = 0
        self.flipped = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await self.connect(self.host, self.target_port)
        try:
            await until_one_ends(self._pipe(reader, up_writer, harm=True), self._pipe(up_reader, writer, harm=False))
        finally:
            self.close(up_writer)

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
