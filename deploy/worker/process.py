"""One worker as a process of its own: its gRPC server, its heartbeats, its own small HTTP door, and how it leaves."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from decode.service import DecodeService
from deploy.runtime.addresses import announced
from deploy.runtime.cpu_binding import use_cores
from deploy.runtime.discovery import addresses, peers_of
from deploy.runtime.heartbeats import Heartbeats, RouterClocks
from deploy.runtime.http_server import open_status_door
from deploy.runtime.kv_transports import keep_nixl_on_loopback, kv_transport_of
from deploy.runtime.lookups import in_a_daemon
from deploy.runtime.open_doors import check_grpc
from deploy.runtime.settings import Settings
from deploy.runtime.signals import on_signals
from deploy.worker.build import WorkerLinks, build_worker
from deploy.worker.model_cache import ModelCache, release
from deploy.worker.proposers import DraftParts, load_draft_parts
from deploy.worker.status_door import WorkerDoor
from deploy.worker.worker import Worker
from kvcache.handoff.dialer import Dialer
from kvcache.pool.remote import RemoteNode
from kvcache.transfer.choice import AUTO, lenders_for, lenders_on_demand
from kvcache.transfer.lent_memory import MemoryLenders
from prefill.service import PrefillService
from serving.grpc_tls import grpc_tls
from serving.loader.loading import LoadedModel
from serving.logs import set_generation
from serving.malloc import keep_freed_memory
from serving.messages import Role
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import Caller, listen, server
from serving.wire import to_pb

log = logging.getLogger(__name__)


class WorkerService(stubs.WorkerServicer):
    """Serves `Worker`: what every worker answers."""

    def __init__(self, worker: Worker):
        self.worker = worker

    async def GetAudit(self, request: pb.AuditRequest, context: object) -> pb.AuditReply:
        return pb.AuditReply(audits=[to_pb(self.worker.audit_now(), pb.Audit)])


class WorkerProcess:
    """`run()` until a signal, a crash, or the parent's end (with `parent` set); returns the exit code."""

    def __init__(self, role: Role, settings: Settings, *, parent: int | None = None):
        self.role = role
        self.settings = replace(settings, model_config=settings.model_config.of(role))
        self.cluster = settings.cluster
        self.kv_transport = kv_transport_of(settings.engine.kv_transport, settings.cluster, settings.security)
        self.parent = parent
        self.tls = grpc_tls(settings.security)
        self._leaving = asyncio.Event()
        self._kv_events_since: dict[str, int | None] = {}  # by router
        self._clocks = RouterClocks()

    async def run(self) -> int:
        settings, cluster = self.settings, self.cluster
        check_grpc(cluster, settings.security)
        keep_nixl_on_loopback(self.kv_transport, settings.security)
        use_cores(settings.engine.cpus, settings.engine.threads)
        transport = kv_transport_of(AUTO, cluster, settings.security)
        cache = ModelCache(settings.model, settings.model_config, settings.pool, cluster, transport, self.tls)
        door = WorkerDoor(settings.model_config.served_model_name, settings.http.metrics_prefix, self.tls)
        async with AsyncExitStack() as stack:
            if cluster.metrics_port is not None:  # before the model loads: who asks meanwhile is told that we live
                await open_status_door(door.app(), settings.http, cluster.metrics_port, stack)
            model = await cache.load()
            stack.callback(release, model)
            door.waits_for = "the engine to start"
            drafts = await asyncio.to_thread(load_draft_parts, self.role, model, settings.model_config, settings.engine)
            grpc_server = server(cluster.cluster_key, self.tls)
            port = listen(grpc_server, cluster.grpc_host, cluster.grpc_port, self.tls)
            address = await in_a_daemon(partial(announced, cluster, port, peers_of(cluster.routers)))
            on_signals(self._leaving.set)  # before this, while anything loads, a signal ends the process at once
            keep_freed_memory()
            worker = await self._build(model, drafts, address, stack)
            stack.push_async_callback(grpc_server.stop, 1.0)
            stubs.add_WorkerServicer_to_server(WorkerService(worker), grpc_server)
            if worker.decode is not None:
                DecodeService(worker.decode, worker.prefill).add_to(grpc_server)
            stubs.add_PrefillServicer_to_server(PrefillService(worker.prefill), grpc_server)
            worker.start()
            await grpc_server.start()
            door.show(worker)
            log.info("%s worker %s listens on %s", self.role, worker.identity.name, worker.address)
            await self._serve(worker, cache)
        return int(worker.loop.crashed)

    async def _build(self, model: LoadedModel, drafts: DraftParts, address: str, stack: AsyncExitStack) -> Worker:
        """The worker with its ways to others, which `stack` closes, and stops it unless it has crashed."""
        key, transport = self.cluster.cluster_key, self.kv_transport
        dialer = Dialer(cluster_key=key, kv_transport=transport, tls=self.tls)
        if self.role is not Role.DECODE:
            await dialer.prepare()
        pool_lenders = lenders_on_demand(transport)
        stack.callback(pool_lenders.close)
        lenders = lenders_for(transport) if self.role is not Role.PREFILL else MemoryLenders()
        links = WorkerLinks(
            address=address,
            dialer=dialer,
            lenders=lenders,
            pool=self.settings.pool,
            pool_link=lambda node: RemoteNode(node, key, lenders=pool_lenders, tls=self.tls),
        )
        model_config, config, name = self.settings.model_config, self.settings.engine, self.cluster.worker_name
        worker = build_worker(self.role, model, model_config, config, links, name=name, drafts=drafts)
        set_generation(worker.identity.generation)
        stack.push_async_callback(_stop, worker)
        stack.callback(lenders.close)
        stack.push_async_callback(dialer.close)
        return worker

    async def _serve(self, worker: Worker, cache: ModelCache) -> None:
        """Report to the routers until it is time to leave, then drain."""
        heartbeats = Heartbeats(
            partial(self._beat, worker),
            self.cluster,
            self.settings.placement,
            fixed_nodes=addresses(self.settings.pool.kvcache_nodes),
            on_pool_nodes=partial(_set_pool_nodes, worker),
            parent=self.parent,
            orphaned=self._leaving.set,
            restarts=worker.restarts,
            tls=self.tls,
        )
        crash = asyncio.create_task(worker.crashed.wait(), name="crash")
        crash.add_done_callback(lambda _: self._leaving.set())
        beating = asyncio.create_task(heartbeats.run(), name="heartbeats")
        storing = asyncio.create_task(cache.store(), name="store-model")
        await self._leaving.wait()
        if not worker.loop.crashed:
            log.info("%s drains", worker.identity.name)
            await heartbeats.during(worker.drain(self.settings.http.shutdown_timeout))
            log.info("%s leaves", worker.identity.name)
        for task in (crash, beating, storing):
            task.cancel()
        await asyncio.gather(crash, beating, storing, return_exceptions=True)

    async def _beat(self, worker: Worker, caller: Caller, seconds: float) -> pb.HeartbeatReply:
        stub, router = stubs.RegistryStub(caller.channel), caller.address
        report = self._report(worker, router)
        self._clocks.forget(router)  # unless it answers
        reply: pb.HeartbeatReply = await stub.Heartbeat(report, metadata=caller.metadata, timeout=seconds)
        self._clocks.told(router, reply.router_time)
        self._kv_events_since[router] = reply.kv_events_since if reply.HasField("kv_events_since") else None
        return reply

    def _report(self, worker: Worker, router: str) -> pb.HeartbeatRequest:
        """The worker's status, when it was made, and the KV events this router has asked for with its last reply."""
        request = pb.HeartbeatRequest(
            router_time=self._clocks.now(router), status=to_pb(worker.status(), pb.WorkerStatus)
        )
        since = self._kv_events_since.get(router)
        if since is not None:
            request.kv_events.CopyFrom(to_pb(worker.kv_events(since), pb.KVEvents))
        return request


async def _stop(worker: Worker) -> None:
    """A crashed worker's engine and pool connector are left as they are."""
    if not worker.loop.crashed:
        await worker.stop()


def _set_pool_nodes(worker: Worker, nodes: list[str]) -> None:
    log.info("the KV pool is %s", ", ".join(nodes) or "gone")
    if worker.connector is not None:
        worker.connector.set_nodes(nodes)
