"""A network that breaks on demand: every connection from one process to another is a link whose faults can be switched.

Each caller goes out through a proxy of its own and says there whom it wants (HTTP CONNECT, which gRPC does by itself
when `grpc_proxy` is set), so a link is known by who calls and who is called, and neither needs a hook.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.fakes.tcp_proxy import TcpProxy, until_one_ends

Result = TypeVar("Result")

PIECES = 64  # that wait in a direction, of 64 KiB at most: then the sender's socket fills
PIECE = 1 << 16
RESET_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST, what waits is thrown away


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong with a link now. Up is from the caller to the called.

    A direction that is dropped stands for packets that are: nothing of it arrives, nobody is told, the connection
    stays, and a new one does not come about. What TCP would send again meanwhile arrives late, once the link is whole.
    """

    drop_up: bool = False
    drop_down: bool = False
    delay: float = 0.0  # seconds, each way
    reset: float = 0.0  # the share of messages at which the connection is reset
    refuse: bool = False  # new connections


HEALTHY = Faults()


class Link:
    """The connections from one process to another. `faults` may be set from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, caller: str, called: str):
        self.caller = caller
        self.called = called
        self.connections: set[Connection] = set()
        self.resets = 0
        self._loop = loop
        self._faults = HEALTHY
        self._changed = asyncio.Event()
        self._chance = random.Random(f"{caller} to {called}")

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        self._loop.call_soon_threadsafe(self._news)

    def _news(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def cut(self) -> None:
        """Reset every connection now; new ones may be made. From any thread."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for connection in list(self.connections):
            connection.reset()

    async def whole(self, *, up: bool, down: bool) -> None:
        """Wait until these directions are not dropped."""
        while (up and self._faults.drop_up) or (down and self._faults.drop_down):
            await self._changed.wait()

    def strikes(self) -> bool:
        """True if the connection is to be reset at this message."""
        struck = self._faults.reset > 0.0 and self._chance.random() < self._faults.reset
        self.resets += struck
        return struck


class Connection:
    """One connection of a link: both its ends."""

    def __init__(self, link: Link, caller: asyncio.StreamWriter, called: asyncio.StreamWriter):
        self.link = link
        self.caller = caller
        self.called = called

    def reset(self) -> None:
        for writer in (self.caller, self.called):
            end = writer.get_extra_info("socket")
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
            writer.transport.abort()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        """One direction: every piece arrives in order, as late as the faults of that moment make it."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)
        await until_one_ends(self._receive(reader, pieces), self._deliver(pieces, writer, up=up))

    async def _receive(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        clock, data = asyncio.get_running_loop().time, b"-"
        while data:
            try:
                data = await reader.read(PIECE)
            except OSError:
                data = b""  # the end has gone: the other end hears of it when it can hear of anything
            await pieces.put((clock() + self.link.faults.delay, data))
        await asyncio.Event().wait()  # its delivery ends the direction

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        clock, link = asyncio.get_running_loop().time, self.link
        while True:
            due, data = await pieces.get()
            if due > clock():
                await asyncio.sleep(due - clock())
            await link.whole(up=up, down=not up)
            if not data:
                return
            if link.strikes():
                self.reset()
                return
            writer.write(data)
            await writer.drain()


class CallerProxy(TcpProxy):
    """Where one process calls out: an HTTP proxy that knows CONNECT alone."""

    def __init__(self, network: FaultNetwork, caller: str):
        super().__init__()
        self.network = network
        self.caller = caller

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, address = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[:2]
        assert method == b"CONNECT", f"{self.caller} asks the proxy for {method!r}"
        host, _, port = address.decode().rpartition(":")
        link = self.network.link(self.caller, self.network.name(address.decode()))
        if link.faults.refuse:
            return
        await asyncio.sleep(2 * link.faults.delay)
        await link.whole(up=True, down=True)  # a connection takes both directions to come about
        up_reader, up_writer = await self.connect(host, int(port))
        connection = Connection(link, writer, up_writer)
        link.connections.add(connection)
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await until_one_ends(
                connection.forward(reader, up_writer, up=True), connection.forward(up_reader, writer, up=False)
            )
        finally:
            link.connections.discard(connection)
            self.close(up_writer)


class FaultNetwork:
    """All links, on a loop in a thread of its own. Use as a context manager.

    Give each process `environ(its name)`, and say with `called` which address is whose.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-network", daemon=True)
        self._proxies: dict[str, CallerProxy] = {}
        self._urls: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._links: dict[tuple[str, str], Link] = {}

    def __enter__(self) -> FaultNetwork:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies.values():
            self._run(proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def environ(self, caller: str) -> dict[str, str]:
        """The environment that takes a process's gRPC calls out through its own proxy."""
        if caller not in self._urls:
            proxy = self._proxies[caller] = CallerProxy(self, caller)
            self._urls[caller] = f"http://{self._run(proxy.start())}"
        return {"grpc_proxy": self._urls[caller], "no_grpc_proxy": "nobody.invalid"}

    def called(self, name: str, address: str) -> None:
        """`address`, host:port, is where the process of this name listens."""
        self._names[address] = name

    def name(self, address: str) -> str:
        return self._names[address]

    def link(self, caller: str, called: str) -> Link:
        """Made when it is first asked for; before or after the first connection."""
        return self._links.setdefault((caller, called), Link(self._loop, caller, called))

    def links(self) -> list[Link]:
        """Those that have been asked for or used."""
        return list(self._links.values())

    def heal(self) -> None:
        for link in self.links():
            link.faults = HEALTHY
