"""The fault proxy does what its faults say, on every direction and to the link named alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.awake import Awake
from tests.fakes.fault_proxy import HEALTHY, FaultNetwork, Faults, Link

SOON = 0.2  # seconds in which what passes has arrived on a machine that does nothing else


class Echo:
    """A server that sends everything back and remembers what came."""

    def __init__(self) -> None:
        self.heard = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.heard += data
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Echo, FaultNetwork, str]]:
    """A server called `server`, and a network around it."""
    server = Echo()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    network = FaultNetwork()
    await asyncio.to_thread(network.__enter__)
    network.called("server", address)
    try:
        yield server, network, address
    finally:
        await asyncio.to_thread(network.__exit__)
        listening.close()


async def dial(network: FaultNetwork, caller: str, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    environ = await asyncio.to_thread(network.environ, caller)
    host, _, port = environ["grpc_proxy"].removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"CONNECT {address} HTTP/1.0\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def comes(reader: asyncio.StreamReader, count: int) -> bytes:
    """So many bytes, however late."""
    async with asyncio.timeout(60):
        return await reader.readexactly(count)


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """True if nothing comes soon."""
    coming = asyncio.create_task(reader.readexactly(1))
    done, _ = await asyncio.wait([coming], timeout=SOON)
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    return not done


async def heard(server: Echo, data: bytes) -> None:
    async with asyncio.timeout(60):
        while server.heard != data:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("up", [True, False])
async def test_a_dropped_direction_is_silent_and_late(up: bool) -> None:
    async with echo() as (server, network, address):
        reader, writer = await dial(network, "a", address)
        network.link("a", "server").faults = Faults(drop_up=up, drop_down=not up)
        writer.write(b"12345")
        assert await is_silent(reader)
        await heard(server, b"" if up else b"12345")
        network.link("a", "server").faults = HEALTHY
        assert await comes(reader, 5) == b"12345"
        writer.close()


async def test_no_connection_comes_about_over_a_dropped_direction() -> None:
    async with echo() as (_, network, address):
        network.link("a", "server").faults = Faults(drop_down=True)
        dialing = asyncio.create_task(dial(network, "a", address))
        done, _ = await asyncio.wait([dialing], timeout=SOON)
        assert not done
        network.heal()
        _, writer = await asyncio.wait_for(dialing, 60)
        writer.close()


async def test_a_fault_is_of_its_link_alone() -> None:
    async with echo() as (_, network, address):
        reader, writer = await dial(network, "b", address)
        network.link("a", "server").faults = Faults(drop_up=True, drop_down=True)
        writer.write(b"12345")
        assert await comes(reader, 5) == b"12345"
        writer.close()


async def test_delay_is_each_way_and_keeps_order() -> None:
    async with echo() as (_, network, address):
        reader, writer = await dial(network, "a", address)
        network.link("a", "server").faults = Faults(delay=0.05)
        with Awake() as awake:
            began = time.monotonic()
            for piece in (b"1", b"2", b"3", b"4"):
                writer.write(piece)
                await asyncio.sleep(0.01)
            assert await reader.readexactly(4) == b"1234"
            assert time.monotonic() - began >= 0.1
            assert awake.seconds(began) < 0.35, "pieces are late together, not one after the other"
        writer.close()


async def broken(reader: asyncio.StreamReader) -> bool:
    """True if the connection has been reset."""
    try:
        async with asyncio.timeout(60):
            await reader.readexactly(1)
    except ConnectionResetError:
        return True
    return False


async def test_resets_hit_their_share_of_messages() -> None:
    async with echo() as (_, network, address):
        link: Link = network.link("a", "server")
        reader, writer = await dial(network, "a", address)
        link.faults = Faults(reset=1.0)
        writer.write(b"1")
        assert await broken(reader)
        assert link.resets == 1
        link.faults = Faults(reset=0.05)
        struck = sum(link.strikes() for _ in range(2000))
        assert 60 < struck < 140
        writer.close()


async def test_cut_resets_what_is_there_and_refuse_what_comes() -> None:
    async with echo() as (_, network, address):
        link = network.link("a", "server")
        reader, writer = await dial(network, "a", address)
        link.cut()
        assert await broken(reader)
        link.faults = Faults(refuse=True)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await dial(network, "a", address)
        link.faults = HEALTHY
        _, again = await dial(network, "a", address)
        for each in (writer, again):
            each.close()
