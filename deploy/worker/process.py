"""One worker as a process of its own: its gRPC server, its heartbeats, its own small HTTP door, and how it leaves."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from deploy.runtime.addresses import announced
from deploy.runtime.cpu_binding import use_cores
from deploy.runtime.devices import use_device
from deploy.runtime.discovery import addresses, peers_of
from deploy.runtime.heartbeats import Heartbeats, RouterClocks
from deploy.runtime.kv_transports import keep_nixl_on_loopback, kv_transport_of
from deploy.runtime.lookups import in_a_daemon
from deploy.runtime.open_doors import check_grpc
from deploy.runtime.settings import Settings
from deploy.runtime.signals import on_signals
from deploy.worker.build import MakeForward
from deploy.worker.flipping import FlippableWorker
from deploy.worker.life import WorkerMaker
from deploy.worker.model_cache import ModelCache, release
from deploy.worker.proposers import load_draft_parts
from deploy.worker.rank_hosts import rank_hosts
from deploy.worker.status_door import WorkerDoor
from deploy.worker.worker import Worker
from kvcache.transfer.choice import AUTO
from serving.collecting import collect_seldom
from serving.grpc_tls import grpc_tls
from serving.malloc import give_back_freed_memory, give_back_memory, keep_freed_memory
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from serving.wire import to_pb

log = logging.getLogger(__name__)


class WorkerProcess:
    """`run()` until a signal, a crash, or the parent's end (with `parent` set); returns the exit code.

    Steps are computed by what `make_forward` makes; None: by the form that fits the model and its device.
    """

    def __init__(
        self, role: Role, settings: Settings, *, parent: int | None = None, make_forward: MakeForward | None = None
    ):
        settings = replace(settings, model_config=use_device(settings.model_config, os.environ))
        self.role = role
        self.given = settings
        self.settings = replace(settings, model_config=settings.model_config.of(role))
        self.cluster = settings.cluster
        self.kv_transport = kv_transport_of(settings.engine.kv_transport, settings.cluster, settings.security)
        self.parent = parent
        self.make_forward = make_forward
        self.tls = grpc_tls(settings.security)
        self._leaving = asyncio.Event()
        self._kv_events_since: dict[str, int | None] = {}  # by router
        self._clocks = RouterClocks()
        self._pool_nodes: list[str] | None = None
        self._restarts: Counter[str] = Counter()  # of the heartbeats
        self._heartbeats: Heartbeats | None = None

    async def run(self) -> int:
        settings, cluster = self.settings, self.cluster
        check_grpc(cluster, settings.security)
        keep_nixl_on_loopback(self.kv_transport, settings.security)
        use_cores(settings.engine.cpus, settings.engine.threads)
        transport = kv_transport_of(AUTO, cluster, settings.security)
        hosts = rank_hosts(settings)
        cache = ModelCache(settings.model, settings.model_config, settings.pool, cluster, transport, self.tls, hosts)
        door = WorkerDoor(settings.model_config.served_model_name, settings.http.metrics_prefix, self.tls)
        async with AsyncExitStack() as stack:
            if cluster.metrics_port is not None:  # before the model loads: who asks meanwhile is told that we live
                from deploy.runtime.http_server import open_status_door  # FastAPI and uvicorn: a tenth of a start

                await open_status_door(door.app(), settings.http, cluster.metrics_port, stack)
            give_back_freed_memory()
            model = await cache.load()
            stack.callback(release, model)
            collect_seldom()  # before the worker is made: others may follow it, and it must be collected then
            door.waits_for = "the engine to start"
            drafts = await asyncio.to_thread(load_draft_parts, self.role, model, settings.model_config, settings.engine)
            grpc_server = server(cluster.cluster_key, self.tls)
            port = listen(grpc_server, cluster.grpc_host, cluster.grpc_port, self.tls)
            address = await in_a_daemon(partial(announced, cluster, port, peers_of(cluster.routers)))
            on_signals(self._leaving.set)  # before this, while anything loads, a signal ends the process at once
            maker = WorkerMaker(
                *(self.given, model, address, self.kv_transport, self.tls), make_forward=self.make_forward
            )
            flippable = FlippableWorker(
                maker, self._leaving, settings.http.shutdown_timeout, partial(self._shown, door)
            )
            stack.push_async_callback(flippable.end)
            worker = await flippable.begin(self.role, drafts, cluster.worker_name)
            del drafts, worker  # another worker may follow, which needs the memory
            give_back_memory()
            keep_freed_memory()
            stack.push_async_callback(grpc_server.stop, 1.0)
            flippable.doors.add_to(grpc_server)
            await grpc_server.start()
            log.info("%s worker %s listens on %s", self.role, flippable.status().name, address)
            await self._serve(flippable, cache)
            return int(flippable.worker is None or flippable.worker.loop.crashed)

    def _shown(self, door: WorkerDoor, worker: Worker | None) -> None:
        """A worker has begun, which may be another one than reported until now; None: the last one ends."""
        door.show(worker)
        self._kv_events_since.clear()
        if worker is not None:
            worker.prefill.arrived = self._tell_news
        if worker is not None and worker.connector is not None and self._pool_nodes is not None:
            worker.connector.set_nodes(self._pool_nodes)

    def _tell_news(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.news()

    async def _serve(self, flippable: FlippableWorker, cache: ModelCache) -> None:
        """Report to the routers until it is time to leave, then drain."""
        heartbeats = self._heartbeats = Heartbeats(
            partial(self._beat, flippable),
            self.cluster,
            self.settings.placement,
            fixed_nodes=addresses(self.settings.pool.kvcache_nodes),
            on_pool_nodes=partial(self._set_pool_nodes, flippable),
            parent=self.parent,
            orphaned=self._leaving.set,
            restarts=self._restarts,
            tls=self.tls,
        )
        flippable.announcer = heartbeats
        beating = asyncio.create_task(heartbeats.run(), name="heartbeats")
        storing = asyncio.create_task(cache.store(), name="store-model")
        await self._leaving.wait()
        await flippable.settle()
        worker = flippable.worker
        if worker is not None and not worker.loop.crashed:
            name = worker.identity.name
            log.info("%s drains", name)
            await heartbeats.during(worker.drain(self.settings.http.shutdown_timeout))
            log.info("%s leaves", name)
        for task in (beating, storing):
            task.cancel()
        await asyncio.gather(beating, storing, return_exceptions=True)

    async def _beat(self, flippable: FlippableWorker, caller: Caller, seconds: float) -> pb.HeartbeatReply:
        stub, router = stubs.RegistryStub(caller.channel), caller.address
        report = self._report(flippable, router)
        self._clocks.forget(router)  # unless it answers
        reply: pb.HeartbeatReply = await stub.Heartbeat(report, metadata=caller.metadata, timeout=seconds)
        self._clocks.told(router, reply.router_time)
        if report.status.instance == flippable.status().instance:
            self._kv_events_since[router] = reply.kv_events_since if reply.HasField("kv_events_since") else None
        return reply

    def _report(self, flippable: FlippableWorker, router: str) -> pb.HeartbeatRequest:
        """The worker's status, when it was made, and the KV events this router has asked for with its last reply."""
        request = pb.HeartbeatRequest(
            router_time=self._clocks.now(router), status=to_pb(flippable.status(), pb.WorkerStatus)
        )
        since, worker = self._kv_events_since.get(router), flippable.worker
        if since is not None and worker is not None:
            request.kv_events.CopyFrom(to_pb(worker.kv_events(since), pb.KVEvents))
        return request

    def _set_pool_nodes(self, flippable: FlippableWorker, nodes: list[str]) -> None:
        log.info("the KV pool is %s", ", ".join(nodes) or "gone")
        self._pool_nodes = nodes
        if flippable.worker is not None and flippable.worker.connector is not None:
            flippable.worker.connector.set_nodes(nodes)
