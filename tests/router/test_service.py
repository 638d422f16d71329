"""The router's gRPC door: which workers it takes, and whose clock a status is dated by."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from router.fleet import Fleet, RouterConfig
from router.service import RegistryService
from serving.errors import InvalidRequest
from serving.messages import PROTOCOL
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, asking, listen, server
from serving.wire import to_pb
from tests.router.scripted import make_status


class Door:
    """A fleet behind its door, and a worker in front of it. The clock stands at 500 s unless moved."""

    def __init__(self) -> None:
        self.now = 500.0
        self.fleet = Fleet(RouterConfig(), lambda status: NotImplemented, clock=lambda: self.now)

    async def start(self) -> None:
        self.server: aio.Server = server()
        stubs.add_RegistryServicer_to_server(RegistryService(self.fleet), self.server)
        self.caller = Caller(f"127.0.0.1:{listen(self.server, '127.0.0.1', 0)}")
        await self.server.start()

    async def stop(self) -> None:
        await self.caller.close()
        await self.server.stop(0)

    async def beat(self, status: Any = None, **fields: Any) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(status=status or to_pb(make_status("w"), pb.WorkerStatus), **fields)
        with asking(self.caller.address):
            reply: pb.HeartbeatReply = await stubs.RegistryStub(self.caller.channel).Heartbeat(request, timeout=10)
        return reply

    def made_at(self) -> float:
        entry = self.fleet.registry.get("w-life")
        assert entry is not None
        return entry.made_at


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    await made.start()
    yield made
    await made.stop()


async def test_a_status_is_dated_by_the_routers_own_clock_sent_back(door: Door) -> None:
    reply = await door.beat()
    assert reply.router_time == 500.0 and door.made_at() == 500.0, "nothing was sent back: it is taken as of now"
    assert reply.workers == 1
    door.now = 501.5
    await door.beat(router_time=501.2)
    assert door.made_at() == 501.2


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1])
async def test_a_worker_of_another_version_is_told_so_whatever_else_it_says(door: Door, protocol: int) -> None:
    """Its status may hold what this version cannot read, such as a role of later days."""
    strange = pb.WorkerStatus(name="w", instance="w-life", role="oracle", protocol=protocol)
    with pytest.raises(InvalidRequest, match=f"worker w speaks protocol {protocol} and this router {PROTOCOL}"):
        await door.beat(strange)
    assert door.fleet.registry.workers == {} and door.fleet.protocols_refused == 1
