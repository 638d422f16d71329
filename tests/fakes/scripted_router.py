"""A router of a worker's heartbeats that answers what it is told to, and counts; and a worker that beats to such."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc import aio

from deploy.runtime.heartbeats import Heartbeats
from serving.config import ClusterConfig, PlacementConfig
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server

KEY = "key"


class ScriptedRouter(stubs.RegistryServicer):
    """Answers with these nodes, and counts."""

    def __init__(self, nodes: list[str]):
        self.nodes = nodes
        self.beats = 0

    async def start(self, key: str = KEY) -> str:
        self.server: aio.Server = server(key)
        stubs.add_RegistryServicer_to_server(self, self.server)
        port = listen(self.server, "127.0.0.1", 0)
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatReply:
        self.beats += 1
        return pb.HeartbeatReply(pool_nodes=self.nodes)


async def send(caller: Caller, seconds: float) -> pb.HeartbeatReply:
    stub = stubs.RegistryStub(caller.channel)
    request = pb.HeartbeatRequest(status=pb.WorkerStatus(name="w"))
    return await stub.Heartbeat(request, metadata=caller.metadata, timeout=seconds)


def beating(routers: str, interval: float = 0.01, **options: Any) -> Heartbeats:
    cluster = ClusterConfig(routers=routers, cluster_key=KEY)
    return Heartbeats(send, cluster, PlacementConfig(heartbeat_interval=interval), **options)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
