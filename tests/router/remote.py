"""A mixed worker behind gRPC on loopback, and a router's link to it."""

from __future__ import annotations

import asyncio
import threading

from grpc import aio

from decode.service import DecodeService
from prefill.service import PrefillService
from router.clients import RemoteWorker
from router.renewed_session import RenewedSession
from serving.errors import MillraceError
from serving.grpc_tls import GrpcTls
from serving.links import LeaseEvent
from serving.messages import LeaseGrant, PrefillOrder, Role
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from tests.decode.workers import Worker
from tests.fakes.sequences import make_order

KEY = "key"
PROMPT = [1, 2, 3]


class Remote:
    """A mixed worker behind gRPC and a router's link to it."""

    def __init__(self, tls: GrpcTls | None = None, calling: GrpcTls | None = None) -> None:
        self.tls, self.calling = tls, calling
        self.worker = Worker(Role.MIXED)
        self.worker.runner.during = self.hold
        self.gate = threading.Event()
        self.gate.set()
        self.events: list[LeaseEvent] = []
        self.lost: list[MillraceError] = []

    def hold(self, work: object) -> None:
        """A step lasts until the gate is open."""
        assert self.gate.wait(10)

    async def start(self) -> None:
        self.server: aio.Server = server(KEY, self.tls)
        self.address = f"127.0.0.1:{listen(self.server, '127.0.0.1', 0, self.tls)}"
        DecodeService(self.worker.decode, self.worker.prefill).add_to(self.server)
        stubs.add_PrefillServicer_to_server(PrefillService(self.worker.prefill), self.server)
        stubs.add_WorkerServicer_to_server(stubs.WorkerServicer(), self.server)  # which implements nothing
        await self.server.start()
        self.worker.start()
        self.link = RemoteWorker(Caller(self.address, KEY, self.calling))

    async def stop(self) -> None:
        self.gate.set()
        await self.link.close()
        await self.server.stop(0)
        await self.worker.loop.stop()

    async def connect(self) -> RenewedSession:
        return await self.link.connect("router", self.events.extend, self.lost.append)

    def prefill(self, grant: LeaseGrant | None, max_tokens: int = 5) -> PrefillOrder:
        lease = grant.lease if grant is not None else None
        return PrefillOrder(order=make_order(PROMPT, lease=lease, max_tokens=max_tokens), grant=grant)

    async def gone(self) -> None:
        """Wait until the worker holds nothing."""
        async with asyncio.timeout(60):
            while not self.worker.idle():
                await asyncio.sleep(0.001)
