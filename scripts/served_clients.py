"""A router and its clients in a process of their own, as they are where a worker serves, for a worker that is measured.

The process gives way to the worker's ranks: how quickly clients read is not what is measured. They speak gRPC.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

import uvloop

from bench.free_pages import all_reported
from bench.progress import say
from decode.service import DecodeService
from deploy.local import LocalCluster
from deploy.worker.build import WorkerLinks, build_worker
from deploy.worker.service import WorkerService
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from prefill.service import PrefillService
from router.clients import RemoteWorker
from router.fleet import Fleet, RouterConfig, WorkerLink
from router.placer import Placer
from router.policies import make_policy
from router.router import Router
from scripts.served_group import Clients, Prompt, Silent, Steps, Text, engine_config
from serving.collecting import collect_seldom
from serving.config import ModelConfig
from serving.loader.loading import LoadedModel
from serving.messages import Role, WorkerStatus
from serving.proto import millrace_pb2_grpc as stubs
from serving.rank_group.leader import SpreadModel
from serving.rpc import Caller, listen, server

NICE = 10
PATIENCE = 60.0


class WorkerBehindGrpc(LocalCluster):
    """A worker of this process whose router is elsewhere, and hears of it by `connection`."""

    def __init__(self, model: LoadedModel, clients: int, connection: Connection) -> None:
        super().__init__(model, ModelConfig(dtype="float32"), engine_config(clients), RouterConfig(patience=PATIENCE))
        self._connection, self._known = connection, False
        self._server, self._dialer = server(), Dialer(local={})

    def _worker(self, role: Role, number: int, dialer: Dialer) -> Worker:
        port = listen(self._server, "127.0.0.1", 0)
        links = WorkerLinks(address=f"127.0.0.1:{port}", dialer=dialer)
        worker = build_worker(role, self.model, self.model_config, self.engine_config, links, name=f"{role}-{number}")
        stubs.add_WorkerServicer_to_server(WorkerService(worker), self._server)
        DecodeService(worker.decode, worker.prefill).add_to(self._server)
        stubs.add_PrefillServicer_to_server(PrefillService(worker.prefill), self._server)
        return worker

    async def start(self) -> None:
        await super().start()
        await self._server.start()

    def beat(self) -> None:
        if self._known:
            for worker in self.workers:
                self._connection.send(worker.status())

    def become_known(self) -> None:
        """From now on the router hears of it, and clients ask."""
        self._known = True
        self.beat()

    async def stop(self) -> None:
        await self._server.stop(0)
        await super().stop()


@asynccontextmanager
async def served_apart(
    spread: SpreadModel, clients: int, topics: Sequence[Sequence[Prompt]], seconds: float
) -> AsyncIterator[tuple[Steps, asyncio.Future[list[Text]]]]:
    """The steps of a worker over `spread`, and what its clients have been told once `seconds` are over.

    There is a client for each prompt of a topic; topics have an equal part of the time, one after the other.
    """
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_clients, args=(theirs, topics, seconds), daemon=True)
    process.start()
    theirs.close()
    cluster = WorkerBehindGrpc(spread, clients, ours)
    try:
        await asyncio.to_thread(ours.recv)  # it has begun
        await cluster.start()
        collect_seldom()
        steps = Steps(spread)
        cluster.workers[0].engine.trace = steps
        await all_reported(say)  # ranks have just freed what their arenas hold now
        cluster.become_known()
        yield steps, asyncio.ensure_future(asyncio.to_thread(ours.recv))
    finally:
        await cluster.stop()
        process.kill()
        process.join()


def run_clients(connection: Connection, topics: Sequence[Sequence[Prompt]], seconds: float) -> None:
    """Sends None once it hears statuses, and at the end the whole texts."""
    os.nice(NICE)
    connection.send(None)
    connection.send(uvloop.run(_asked(connection, topics, seconds)))


async def _asked(connection: Connection, topics: Sequence[Sequence[Prompt]], seconds: float) -> list[Text]:
    config = RouterConfig(patience=PATIENCE)
    fleet = Fleet(config, _link)
    clients = Clients(Router(Placer(fleet, make_policy(config.policy)), Silent()))
    loop, known = asyncio.get_running_loop(), asyncio.Event()

    def hear() -> None:
        while True:
            try:
                status: WorkerStatus = connection.recv()
            except (EOFError, OSError):  # the process that is measured is at its end, or this one
                return
            loop.call_soon_threadsafe(fleet.heartbeat, status)
            loop.call_soon_threadsafe(known.set)

    threading.Thread(target=hear, name="heartbeats", daemon=True).start()
    await known.wait()
    clients.start(topics[0])
    for topic in [*topics[1:], topics[0]]:
        await asyncio.sleep(seconds / len(topics))
        clients.wanted = list(topic)
    await clients.stop()
    await fleet.close()
    return clients.texts


def _link(status: WorkerStatus) -> WorkerLink:
    return RemoteWorker(Caller(status.address))
