"""Workers that can flip, behind real gRPC on loopback in this process, and the control door of their router."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence

from deploy.autoscaler.by_router import RouterActuator
from deploy.control.fleet_control import FleetControl
from deploy.control.service import ControlService, FlipCalls
from deploy.runtime.settings import read_settings
from deploy.worker.flipping import FlippableWorker
from deploy.worker.life import WorkerMaker
from router.clients import RemoteWorker
from router.fleet import WorkerLink
from router.service import RegistryService
from serving.grpc_tls import GrpcTls
from serving.loader.loading import load
from serving.messages import Role, WorkerStatus
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from tests.flow.remote import KEY, RemoteCluster

DRAIN_SECONDS = 30.0


class NothingBelow:
    """No worker is kept running here (deploy.control.below.Below)."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Role]] = []

    def start(self) -> None: ...
    async def stop(self, seconds: float) -> None: ...

    def roles(self) -> Mapping[str, Role]:
        return {}

    def leaving(self) -> Sequence[str]:
        return ()

    def add(self, role: Role) -> None:
        raise AssertionError("nobody asks for more")

    def let_go(self, name: str) -> None:
        raise AssertionError("nobody is let go")

    def flipped(self, name: str, role: Role) -> None:
        self.told.append((name, role))


class FlippingCluster(RemoteCluster):
    """A RemoteCluster whose workers flip; `actuator` asks its router's control door. All of it speaks `tls`."""

    tls: GrpcTls | None = None

    async def start(self) -> None:
        self.servers, self.dialers, self.workers = [], [], []
        self.flippable: list[FlippableWorker] = []
        for number, role in enumerate(self.roles):
            await self._serve(role, number)
        self.below = NothingBelow()
        self.registry = RegistryService(self.fleet)
        self.control = FleetControl(self.fleet, self.below, FlipCalls(KEY, self.tls, DRAIN_SECONDS))
        door = server(KEY, self.tls)
        stubs.add_ControlServicer_to_server(ControlService(self.control), door)
        self.door_address = f"127.0.0.1:{listen(door, '127.0.0.1', 0, self.tls)}"
        await door.start()
        self.servers.append(door)
        self.actuator = RouterActuator(self.door_address, KEY, "tests", self.tls)
        self.beat()
        self._start_beating()

    async def _serve(self, role: Role, number: int) -> None:
        grpc_server = server(KEY, self.tls)
        port = listen(grpc_server, "127.0.0.1", 0, self.tls)
        given = {"num_kv_blocks": "256", "block_size": "16", "max_num_batched_tokens": "64", "cluster_key": KEY}
        model = load(self.model.path, self.model.dtype)  # its own, as in a process: it gives up what it packs
        maker = WorkerMaker(read_settings(given), model, f"127.0.0.1:{port}", "grpc", self.tls)
        flippable = FlippableWorker(maker, asyncio.Event(), DRAIN_SECONDS, lambda worker: None)
        flippable.announcer = self
        await flippable.begin(role, await maker.drafts(role), f"{role}-{number}")
        flippable.doors.add_to(grpc_server)
        await grpc_server.start()
        self.flippable.append(flippable)
        self.servers.append(grpc_server)

    def _link(self, status: WorkerStatus) -> WorkerLink:
        return RemoteWorker(Caller(status.address, KEY, self.tls))

    def beat(self) -> None:
        for each in self.flippable:
            self.fleet.heartbeat(each.status())
        self.fleet.expire()

    async def once(self) -> None:
        self.beat()

    async def lacking(self, name: str) -> Role | None:
        reply = await self.registry.Without(pb.WithoutRequest(worker=name), None)
        return Role(reply.role) if reply.role else None

    async def during(self, drain: Coroutine[None, None, None]) -> None:
        draining = asyncio.create_task(drain)
        try:
            await asyncio.sleep(0)
            self.beat()
            await draining
        finally:
            draining.cancel()

    def named(self, name: str) -> FlippableWorker:
        return next(each for each in self.flippable if each.status().name == name)

    async def stop(self) -> None:
        await self.actuator.close()
        await self._background.stop()
        await self.fleet.close()
        for each in self.flippable:
            await each.end()
        for grpc_server in self.servers:
            await grpc_server.stop(0)
